"""Linear layers sharded over tensor-parallel ranks."""

from megalowbit.layers.tensor_parallel.linear import Cut

__all__ = ["Cut"]
