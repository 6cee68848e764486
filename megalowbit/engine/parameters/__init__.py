"""An engine's parameters for users: full weights, masters and moments, gradients, parameter splits."""
