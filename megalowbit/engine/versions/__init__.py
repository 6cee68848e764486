"""Which versions of DeepSpeed a run may start with, and what of its internals our results rely on."""
