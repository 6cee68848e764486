"""Gradients between backward and update: fp32 buffer, norm, overflow location, and the report of a step."""
