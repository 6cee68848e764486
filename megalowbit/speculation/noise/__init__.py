"""The signal-to-noise ratio of a product at a precision, from statistics of its operands."""
