"""One run, one folder: what lies where in it, and how a run is begun again."""
