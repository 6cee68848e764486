"""Tensor parallelism: DeepSpeed shards the model, our layers use the shards."""
