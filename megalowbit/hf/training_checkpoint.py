"""Our training checkpoints, read without DeepSpeed, and weights-only ones to start from.

A checkpoint is a folder `step-00000040/` of `mp_rank_00_model_states.pt` (written by `torch.save`;
`"module"` is the state dict of the converted model, `"megalowbit"` says which model and recipe it is) and
`manifest.json` (size and SHA-256 of every file); the highest step that has one is the newest, for the
trainer as for the tools. Everything is verified before it is unpickled. Not covered: optimizer states and
tensor-parallel shards.
"""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megalowbit.durable import (
    LATEST,
    complete_steps,
    is_step_name,
    read_manifest,
    step_name,
    steps_in,
    verify_folder,
    write_manifest,
)
from megalowbit.errors import UserError
from megalowbit.hf.new_folder import new_folder
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.surgery import convert

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
WEIGHTS_FILE = "mp_rank_00_model_states.pt"
CHECKPOINTS_FOLDER = "checkpoints"
OUR_KEY = "megalowbit"


class TrainingCheckpoint(NamedTuple):
    """What a model is rebuilt from.

    Attributes:
        hf_config: fields of the Hugging Face configuration.
        recipe: how the model was converted.
        state_dict: of the converted model, in the stored dtype, on the CPU.
    """

    hf_config: dict[str, Any]
    recipe: Recipe
    state_dict: dict[str, torch.Tensor]


def is_training_checkpoint(path: Path) -> bool:
    """Whether `path` is, or leads to, one of our checkpoints (damaged ones included)."""
    return _is_step_folder(path) or bool(steps_in(path)) or (path / CHECKPOINTS_FOLDER).is_dir()


def find_checkpoint(path: Path) -> Path:
    """The step folder meant by `path`: itself, or the newest complete one of a run or its `checkpoints/`.

    Raises:
        UserError: there is none.
    """
    if _is_step_folder(path):
        return path
    for folder in (path, path / CHECKPOINTS_FOLDER):
        if steps := complete_steps(folder):
            return folder / step_name(steps[-1])
    raise UserError(
        f"no complete training checkpoint in {path}: name a run's folder or a step-… folder below it"
    )


def read_checkpoint(folder: Path) -> TrainingCheckpoint:
    """Verify and read a checkpoint.

    Args:
        folder: anything `find_checkpoint` understands.

    Raises:
        UserError: none there, a file missing or damaged, another format, tensor-parallel shards.
    """
    step = find_checkpoint(folder)
    _verify(step)
    content = _load(step / WEIGHTS_FILE)
    ours = content.get(OUR_KEY)
    if not isinstance(ours, dict) or not isinstance(content.get("module"), dict):
        raise UserError(
            f"checkpoint {step} was not written by megalowbit: convert the model from Hugging Face"
        )
    if ours.get("format") != FORMAT:
        raise UserError(f"checkpoint {step} has format {ours.get('format')!r}, not {FORMAT}: use its version")
    return TrainingCheckpoint(ours["hf_config"], Recipe.from_dict(ours["recipe"]), content["module"])


def write_start_checkpoint(model: PreTrainedModel, recipe: Recipe | str, folder: Path) -> Path:
    """Write the weights of a plain model as a checkpoint to start training from.

    Args:
        model: an unconverted Hugging Face model; left as it is. Weights are stored in its dtype.
        recipe: what the model is converted with.
        folder: a new folder, for `step-00000000/` and `latest`.

    Returns:
        The step folder.

    Raises:
        UserError: `folder` exists and is not empty or cannot be written; the recipe matches nothing.
    """
    converted = copy.deepcopy(model)
    report = convert(converted, recipe)
    content = {
        "module": converted.state_dict(),
        OUR_KEY: {
            "format": FORMAT,
            "step": 0,
            "hf_config": model.config.to_dict(),
            "recipe": report.recipe.to_dict(),
            "config": {},
        },
    }
    with new_folder(Path(folder)) as draft:
        step = draft / step_name(0)
        step.mkdir()
        torch.save(content, step / WEIGHTS_FILE)
        write_manifest(step)
        (draft / LATEST).write_text(step.name, encoding="utf-8")
    return Path(folder) / step_name(0)


def _is_step_folder(path: Path) -> bool:
    return (is_step_name(path.name) and path.is_dir()) or (path / WEIGHTS_FILE).is_file()


def _verify(step: Path) -> None:
    remedy = "use an older checkpoint"
    names = [entry.name for entry in read_manifest(step, remedy=remedy)]
    shards = [name for name in names if re.fullmatch(r"mp_rank_\d+_model_states\.pt", name)]
    if shards != [WEIGHTS_FILE]:
        raise UserError(
            f"checkpoint {step} holds {sorted(shards)}, not {WEIGHTS_FILE} alone: merge its shards first"
        )
    verify_folder(step, remedy=remedy)


def _load(path: Path) -> dict[str, Any]:
    try:
        # mmap: optimizer states in the file are then never read
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path} cannot be read ({reason}): use an older checkpoint") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint: name another")
    return content
