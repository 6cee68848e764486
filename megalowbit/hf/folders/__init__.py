"""A folder of Hugging Face: its configuration, weights and tokenizer; a folder created as a whole."""
