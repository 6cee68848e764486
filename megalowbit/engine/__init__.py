"""The only package that imports DeepSpeed: its engine with our layers, optimizer and checkpoints."""
