"""Operations and modules that run in fp32 in a half-precision model."""
