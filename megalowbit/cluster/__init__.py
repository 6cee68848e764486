"""Runs on SLURM clusters: job scripts, and a simulation of how failures reduce goodput."""
