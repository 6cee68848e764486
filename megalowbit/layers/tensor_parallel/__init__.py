"""Linear layers of which every tensor-parallel rank holds a shard."""

from megalowbit.layers.tensor_parallel.linear import Sharding

__all__ = ["Sharding"]
