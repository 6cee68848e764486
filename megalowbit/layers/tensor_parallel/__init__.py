"""Linear layers sharded over tensor-parallel ranks."""

from megalowbit.layers.tensor_parallel.linear import Sharding

__all__ = ["Sharding"]
