"""Which precision each matrix product of a layer runs at: estimated, predicted, decided, verified."""
