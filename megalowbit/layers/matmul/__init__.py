"""The three products of a low-bit linear layer: operands, GEMMs, what is saved for backward."""
