"""What a low-precision number format is: element grid, rounding onto it, block scales, codes to bytes."""
