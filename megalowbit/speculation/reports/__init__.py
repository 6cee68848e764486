"""What speculation did in a run, read back from its folder and drawn."""
