"""Reading and writing Hugging Face models and checkpoints."""
