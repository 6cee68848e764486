"""Parameters of an engine's model as users see them: weights, masters and moments, gradients, splits."""
