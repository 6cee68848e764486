"""Readers of checkpoints that other programs wrote: plain DeepSpeed's, universal ones, Megatron-LM's."""
