"""Checkpoints of an engine: written whole or not at all, verified, loaded at another stage or rank count."""
