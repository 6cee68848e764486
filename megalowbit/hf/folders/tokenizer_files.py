"""Copies the files of a tokenizer unchanged, including special tokens and chat template.

A tokenizer that is read and written again gets the form of another version, and must have an end-of-sequence
token here. The files in a Hugging Face folder are recognised by their names. `config.json` is copied too,
because older tokenizers name their class there. Code (`.py`) is not copied.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import CHECKPOINTS_FOLDER, find_checkpoint, is_training_checkpoint
from megalowbit.json_text import refuse_irregular_files

FOLDER = "tokenizer"  # in a run's folder, and in that of a checkpoint to start from
MAIN_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
FURTHER_FILES = (
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.*.json",
    "chat_template.*",
)
TEMPLATES = "additional_chat_templates"
CONFIG = "config.json"


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` contains a tokenizer."""
    return any(path.is_file() for pattern in MAIN_FILES for path in folder.glob(pattern))


def tokenizer_folder(path: Path) -> Path | None:
    """The folder with the tokenizer of the weights in `path`; None: there is none, or no weights.

    Args:
        path: a Hugging Face folder, or a run, a checkpoint to start from, or a step folder in them.
    """
    place = path
    if is_training_checkpoint(path):
        try:
            step = find_checkpoint(path)
        except UserError:
            return None
        is_of_run = step.parent.name == CHECKPOINTS_FOLDER
        place = (step.parent.parent if is_of_run else step.parent) / FOLDER
    return place if has_tokenizer(place) else None


def copy_tokenizer(source: Path, target: Path, *, with_config: bool) -> None:
    """Copy a tokenizer's files, if there are any.

    Args:
        source: a Hugging Face folder, possibly with links into its cache.
        target: created if it does not exist.
        with_config: also copy `config.json`, unless `target` has one.

    Raises:
        OSError: a file cannot be read or written.
        UserError: a FIFO, a socket or a device is among the files.
    """
    if not has_tokenizer(source):
        return
    refuse_irregular_files("tokenizer", source, TEMPLATES)
    patterns = (*MAIN_FILES, *FURTHER_FILES, *((CONFIG,) if with_config else ()))
    target.mkdir(exist_ok=True)
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    templates = source / TEMPLATES
    if templates.is_dir():
        (target / TEMPLATES).mkdir(exist_ok=True)
        for path in sorted(templates.glob("*.jinja")):
            shutil.copyfile(path, target / TEMPLATES / path.name)
