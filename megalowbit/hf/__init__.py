"""Hugging Face models in and out: GPT-2 and LLaMA name tables, model building, checkpoints to and fro."""
