"""The loss of a causal language model: without the matrix of all logits, by token, by row."""
