"""The mixed-precision optimizers users meet, and what they are made of."""
