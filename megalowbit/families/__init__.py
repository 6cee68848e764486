"""Model families: one file each, and one line each in the registry."""
