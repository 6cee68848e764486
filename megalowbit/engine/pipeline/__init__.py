"""Pipeline parallelism: stages of a model, their batches, and changes to DeepSpeed's pipeline engine."""
