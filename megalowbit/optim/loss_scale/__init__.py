"""Loss scales: the scaler interface, the dynamic rules, one file for each strategy, saved states."""
