"""Checks that refuse a run before its first step, on every rank and with one line."""
