"""Definitions of low-precision number formats: element grids, rounding, block scales, and byte packing."""
