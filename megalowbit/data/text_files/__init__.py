"""Corpora of text in files: finding the files, and reading documents from each kind."""
