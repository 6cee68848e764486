"""Reads training checkpoints of any ZeRO stage and number of processes, without DeepSpeed."""
