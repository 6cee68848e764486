"""Loss scales: what every scaler offers, how a scale moves, one strategy a file, saved states."""
