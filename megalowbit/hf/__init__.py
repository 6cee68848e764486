"""Hugging Face models and checkpoints in and out."""
