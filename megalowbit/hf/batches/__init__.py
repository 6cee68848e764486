"""Batches on their way to a Hugging Face model: upload, and attention within the documents of a row."""
