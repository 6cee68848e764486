"""GPU kernels in Triton and what launches them: bit-equal to `reference`."""
