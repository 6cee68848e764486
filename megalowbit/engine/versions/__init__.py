"""The versions of DeepSpeed that a run may start with, and the internals that our results depend on."""
