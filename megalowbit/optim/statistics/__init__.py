"""Statistics of gradients taken during backward, and layer scaling."""
