"""A pretraining run: its command line, configuration, folder, loop and records."""
