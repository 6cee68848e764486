"""Gradients between backward and update: their fp32 buffer, norm, overflows, and the report of a step."""
