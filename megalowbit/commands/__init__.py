"""The command line `megalowbit`: a table of commands, and one file for each."""
