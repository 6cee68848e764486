"""The mixed-precision optimizers and their parts."""
