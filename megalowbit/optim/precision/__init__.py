"""Which operations and modules of a half-precision model run in fp32."""
