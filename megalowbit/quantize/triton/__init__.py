"""GPU kernels in Triton and their launchers, bit-equal to `reference`."""
