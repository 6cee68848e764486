"""The only room that imports deepspeed: its configuration, its engine with our optimizer, checkpoints."""
