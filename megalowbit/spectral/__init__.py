"""Low-rank factors of a matrix, the split against their quantised form, gains on singular values."""
