"""Findings: what went wrong in a run, read from the files in its folder. Imported without torch."""
