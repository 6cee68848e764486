"""Several runs of one configuration, and the comparison of their losses."""
