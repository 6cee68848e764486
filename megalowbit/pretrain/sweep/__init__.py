"""Several runs of one configuration beside each other, and what their losses say."""
