"""What the Triton kernels launch, and what they compile to for GPUs that are not there."""
