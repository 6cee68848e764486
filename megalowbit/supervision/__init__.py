"""Notice that a run cannot go on, name the rank that caused it, end every process in time; no DeepSpeed."""
