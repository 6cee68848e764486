"""The sections of the report of a run, from its head to its settings."""
