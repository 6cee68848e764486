"""Exports low-bit models with their weights packed, in the layouts that inference servers read."""
