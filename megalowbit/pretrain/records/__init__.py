"""The output of a run: metrics, console lines and the summary."""
