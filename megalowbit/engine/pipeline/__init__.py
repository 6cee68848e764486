"""Pipeline parallelism: stages of a model, their batches, and what DeepSpeed's engine needs for them."""
