"""Tensors in and out of low precision: quantizers by name, packed tensors, their counts, random streams."""
