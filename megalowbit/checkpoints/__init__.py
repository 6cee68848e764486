"""What training checkpoints of any ZeRO stage and number of processes hold, read without DeepSpeed."""
