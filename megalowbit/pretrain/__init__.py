"""The story of a pretraining run: its configuration, its folder, its loop, its command line."""
