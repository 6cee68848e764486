"""Checkpoints to start from, made of a model in memory."""

import tempfile
from pathlib import Path

from megalowbit.hf.checkpoint import import_checkpoint


def write_start_checkpoint(model, recipe, folder):
    """Save a plain model and import it; returns the step folder."""
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as saved:
        model.save_pretrained(saved)
        return import_checkpoint(Path(saved), folder, recipe)
