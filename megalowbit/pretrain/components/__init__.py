"""Optional parts of a run; each declares its settings, state and metrics."""
