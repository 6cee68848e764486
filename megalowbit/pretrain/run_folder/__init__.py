"""The folder of a run: its files, its lock and `--restart`."""
