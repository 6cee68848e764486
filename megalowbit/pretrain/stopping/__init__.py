"""Requests to save and end: signals, and a launcher that has gone."""
