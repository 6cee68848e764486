"""Commands around one run: its start on a cluster, its data, its configuration, its cost."""
