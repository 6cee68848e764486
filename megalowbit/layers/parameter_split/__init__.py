"""Weights split into parameters: W = W_R + U·diag(S)·V."""
