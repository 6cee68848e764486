"""megalowbit's training checkpoints, read without DeepSpeed, and weights-only ones to start from.

A checkpoint is a folder `step-00000040/` with files written by `torch.save` (`"megalowbit"` in the first one
names model and recipe) and `manifest.json` (size and SHA-256 of every file). In one to start from the weights
are in safetensors files, which are written tensor by tensor. The newest checkpoint is the one
of the highest step with a manifest, for the trainer and for the tools. Everything is verified before it is
unpickled. The package `checkpoints` knows what the other files contain at each ZeRO stage and number of
ranks. Not covered: shards of tensor-parallel ranks saved before layouts were written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megalowbit.checkpoints.contents import FIRST_FILES, CheckpointContents, StateDict
from megalowbit.checkpoints.layout import ENGINE_KEY
from megalowbit.checkpoints.shards import model_file, reading
from megalowbit.durable_files import (
    DAMAGED,
    MANIFEST,
    complete_steps,
    damaged_in,
    is_step_name,
    sha256_of,
    step_name,
    steps_in,
    verify_folder,
)
from megalowbit.errors import UserError
from megalowbit.layers.conversion.static_inputs import StaticInputs
from megalowbit.layers.recipe import Recipe

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

FORMAT = 1
HEADER_FILE = model_file(0, 0)
CHECKPOINTS_FOLDER = "checkpoints"
HF_FILES = ("*.json", "*.safetensors", "*.bin")  # configuration, weights, and their index
OUR_KEY = "megalowbit"


class TrainingCheckpoint(NamedTuple):
    """The contents from which a model is rebuilt.

    Attributes:
        hf_config: fields of the Hugging Face configuration.
        recipe: the recipe of the conversion.
        state_dict: parameters of the converted model in their own layout, on the CPU, each tensor read on
            access: fp32 masters if there are any.
        half_state_dict: the same in the dtype in which the model computed.
        generation: see `hf.generation`; None in older checkpoints.
        header: all of the checkpoint's counters, states and settings, see `CheckpointContents`.
        static_inputs: what was recorded of the layers' inputs at the end of training, see
            `layers.conversion.static_inputs`; None: nothing yet, or an older checkpoint.
        folder: the step folder that was read.
    """

    hf_config: dict[str, Any]
    recipe: Recipe
    state_dict: StateDict
    half_state_dict: StateDict
    generation: dict[str, Any] | None = None
    header: Mapping[str, Any] = MappingProxyType({})
    static_inputs: StaticInputs | None = None
    folder: Path = Path()


def is_training_checkpoint(path: Path) -> bool:
    """Whether `path` is or contains a training checkpoint, also a damaged one."""
    return _is_step_folder(path) or bool(steps_in(path)) or (path / CHECKPOINTS_FOLDER).is_dir()


def find_checkpoint(path: Path | str) -> Path:
    """The step folder for `path`: itself, or the newest complete one of a run or its `checkpoints/`.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if _is_step_folder(path):
        return path
    for folder in (path, path / CHECKPOINTS_FOLDER):
        if steps := complete_steps(folder):
            return folder / step_name(steps[-1])
    raise UserError(
        f"no complete training checkpoint in {path}: name a run's folder or a step-… folder in it"
    )


def digest_of_weights(path: Path) -> str:
    """Hexadecimal SHA-256 of the names and contents of the files that a model is loaded from.

    Args:
        path: a Hugging Face folder, or what `find_checkpoint` takes.

    Raises:
        UserError: it is neither.
    """
    if is_training_checkpoint(path):
        return sha256_of(find_checkpoint(path) / MANIFEST)  # which has those of all files
    found = sorted(each for end in HF_FILES for each in path.glob(end))
    if not found:
        raise UserError(f"{path} has no weights: name a Hugging Face folder or a training checkpoint")
    listed = "".join(f"{each.name} {sha256_of(each)}\n" for each in found)
    return hashlib.sha256(listed.encode()).hexdigest()


def read_checkpoint(folder: Path | str) -> TrainingCheckpoint:
    """Verify and read the checkpoint that `find_checkpoint` finds.

    Raises:
        UserError: there is none, a file is missing or damaged, or the format is another one.
    """
    folder = Path(folder)
    step = find_checkpoint(folder)
    if not _is_step_folder(folder) and (passed := _passed_over(step)):
        logger.warning("reading %s, because %s is incomplete or damaged", step, ", ".join(passed))
    verify_folder(step, remedy="use an older checkpoint")
    with reading(f"checkpoint {step}"):
        return _read_contents(step)


def holds_run(step: Path, recipe: Recipe) -> bool:
    """Whether a step folder holds the state of a run with this recipe, and not weights alone.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        header = CheckpointContents(step).header
        is_run = header.get("progress") is not None
        return is_run and Recipe.from_dict(header[OUR_KEY]["recipe"]) == recipe


def stored_header(step: Path) -> Mapping[str, Any]:
    """What a step folder says of its model: `hf_config`, `generation` …; empty if it is not ours.

    Files are not verified, and no weight is read.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        ours = CheckpointContents(step).header.get(OUR_KEY)
        return ours if isinstance(ours, dict) else {}


def stored_config(step: Path) -> dict[str, Any]:
    """Fields of the Hugging Face configuration of the model in a step folder; none if it is not ours.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        config: dict[str, Any] = stored_header(step).get("hf_config", {})
    return config


def stored_static_inputs(step: Path) -> StaticInputs | None:
    """What was recorded of the layers' inputs in a step folder; None: nothing, or it is not ours.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        return _static_inputs(stored_header(step))


def _passed_over(step: Path) -> list[str]:
    """Names of incomplete or damaged checkpoints of later steps than the newest complete one."""
    names = [*map(step_name, steps_in(step.parent)), *damaged_in(step.parent)]
    return [name for name in names if _number_of(name) > _number_of(step.name)]


def _number_of(name: str) -> int:
    return int(name.partition(DAMAGED)[0].removeprefix("step-"))


def _read_contents(step: Path) -> TrainingCheckpoint:
    contents = CheckpointContents(step, kept_bytes=0)
    ours = contents.header.get(OUR_KEY)
    if not isinstance(ours, dict):
        if ENGINE_KEY in contents.header:
            raise UserError(
                f"checkpoint {step} was saved by an engine of mlb.initialize, without the configuration of "
                "its model: load it into such an engine, and save its model with save_16bit_model"
            )
        raise UserError(
            f"checkpoint {step} was not written by megalowbit: convert the model from Hugging Face"
        )
    if ours.get("format") != FORMAT:
        raise UserError(f"checkpoint {step} has format {ours.get('format')!r}, not {FORMAT}: use its version")
    return TrainingCheckpoint(
        ours["hf_config"],
        Recipe.from_dict(ours["recipe"]),
        StateDict(contents),
        StateDict(contents, as_stored=True),
        ours.get("generation"),
        contents.header,
        _static_inputs(ours),
        step,
    )


def _static_inputs(ours: Mapping[str, Any]) -> StaticInputs | None:
    stored = ours.get("static_inputs")
    return None if stored is None else StaticInputs.from_dict(stored)


def _is_step_folder(path: Path) -> bool:
    if is_step_name(path.name) and path.is_dir():
        return True
    return any((path / name).is_file() for name in FIRST_FILES)
