"""Tensors in and out of low precision: quantisers by name, packed tensors, their counts, random streams."""
