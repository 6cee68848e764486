"""Where the facts of a step go: console, JSON lines, TensorBoard, Weights & Biases."""
