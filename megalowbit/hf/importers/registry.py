"""Recognises whose checkpoint a folder contains, and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalowbit.checkpoints.plain import plain_checkpoint
from megalowbit.durable_files import LATEST, MANIFEST, is_step_name
from megalowbit.errors import UserError
from megalowbit.hf.importers.base import ForeignModel, entries, named_step
from megalowbit.hf.importers.deepspeed import SHARD_FILE, read_deepspeed
from megalowbit.hf.importers.megatron import find_megatron, read_megatron
from megalowbit.hf.importers.universal import is_universal, read_universal

LATEST_UNIVERSAL = "latest_universal"


def is_foreign(source: Path) -> bool:
    """Whether `source` is or contains a checkpoint of DeepSpeed or Megatron-LM.

    Raises:
        UserError: it is one, but incomplete or in a form that cannot be read.
    """
    return find_megatron(source) is not None or _find_deepspeed(source) is not None


def read_foreign(source: Path, config: Mapping[str, Any] | None) -> ForeignModel:
    """The model in a checkpoint of DeepSpeed or Megatron-LM.

    Args:
        source: the folder of one step, or the folder of a run with a file that names its latest step.
        config: fields of the Hugging Face configuration; Megatron-LM's checkpoints may do without.

    Raises:
        UserError: it is neither, or cannot be read; see the importers.
    """
    megatron = find_megatron(source)
    if megatron is not None:
        return read_megatron(megatron, config)
    folder = _find_deepspeed(source)
    if folder is None:
        raise UserError(
            f"checkpoint {source} is neither DeepSpeed's nor Megatron-LM's: name the folder that contains "
            "latest or latest_checkpointed_iteration.txt, or a step's folder in it"
        )
    return read_universal(folder, config) if is_universal(folder) else read_deepspeed(folder, config)


def _find_deepspeed(source: Path) -> Path | None:
    """The folder of one step of a DeepSpeed checkpoint in `source`; None if there is none."""
    found = plain_checkpoint(source)
    if found is not None or not source.is_dir():
        return found
    names = entries(source)
    if MANIFEST not in names and (any(map(SHARD_FILE.fullmatch, names)) or is_universal(source)):
        return source
    for latest in (LATEST, LATEST_UNIVERSAL):
        tag = Path(named_step(source / latest)).name if latest in names else ""
        if tag and not is_step_name(tag):  # ours are read elsewhere
            if not (source / tag).is_dir():
                raise UserError(f"{source / latest} names {tag}, which is not in {source}: name a folder")
            if latest == LATEST_UNIVERSAL:
                return source / tag
    steps = [name for name in names if (source / name).is_dir() and plain_checkpoint(source / name)]
    if steps:
        raise UserError(f"{source} has no file latest: name one of its folders: {', '.join(steps[:8])}")
    return None
