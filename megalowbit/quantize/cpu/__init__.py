"""CPU kernels in C: bit-equal to `reference`, compiled on first use."""
