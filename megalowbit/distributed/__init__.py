"""Process groups, the process grid, collectives that agree or fail together, random generators' states."""
