"""Tensor parallelism: DeepSpeed cuts the model, our layers take over the shards."""
