"""Reads the files of a run folder: columns of numbers, tables by layer, settings, attempts."""
