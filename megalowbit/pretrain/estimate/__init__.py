"""How much memory a run will need, before any of it is allocated."""
