"""What to check in a machine's first GPU hour, in order: steps, their report, and the runner."""
