"""Process groups, collectives that agree or fail together, the process grid, generators' states."""
