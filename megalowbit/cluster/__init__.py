"""Runs on clusters: their job scripts, and how much of the machines' time they make use of."""
