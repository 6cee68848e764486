"""What a run writes down: metrics, console lines, summary."""
