"""Checks that reject a run before its first step, on every rank and with one line."""
