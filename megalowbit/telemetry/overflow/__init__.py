"""Overflow counters of quantised tensors, per layer and role."""
