"""Models whose weights arrive after they are built: empty models, and their weights, one tensor at a time."""
