"""Tokenizers of Hugging Face's libraries."""
