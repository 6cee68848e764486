"""megalowbit's training checkpoints, read without DeepSpeed, and weights-only ones to start from.

A checkpoint is a folder `step-00000040/` with files written by `torch.save` (`"megalowbit"` in the first one
names model and recipe) and `manifest.json` (size and SHA-256 of every file). In one to start from the weights
are in safetensors files, which are written tensor by tensor. The newest checkpoint is the one
of the highest step with a manifest, for the trainer and for the tools. Everything is verified before it is
unpickled. The package `checkpoints` knows what the other files contain at each ZeRO stage and number of
ranks. Not covered: shards of tensor-parallel ranks saved before layouts were written.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megalowbit.checkpoints.contents import FIRST_FILES, CheckpointContents, StateDict
from megalowbit.checkpoints.layout import ENGINE_KEY, LAYOUT_KEY, Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import ORIGIN_KEY, model_file, origin_of, reading
from megalowbit.durable_files import (
    DAMAGED,
    LATEST,
    FileFacts,
    complete_steps,
    damaged_in,
    is_step_name,
    step_name,
    steps_in,
    verify_folder,
    write_manifest,
)
from megalowbit.errors import UserError
from megalowbit.hf.folders.conversion import Conversion
from megalowbit.hf.folders.shards import SHARD_SIZE, TensorSpec
from megalowbit.hf.folders.stored_weights import (
    misshapen,
    refuse_differences,
    refuse_nonfinite_weight,
    tied_names,
    widest,
)
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.folders.tokenizer_files import copy_tokenizer
from megalowbit.hf.generation import prepare_for_training, stored_generation
from megalowbit.hf.model import random_model
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.static_inputs import StaticInputs
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.state_dict_layout import parameter_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FORMAT = 1
HEADER_FILE = model_file(0, 0)
CHECKPOINTS_FOLDER = "checkpoints"
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
    """

    hf_config: dict[str, Any]
    recipe: Recipe
    state_dict: StateDict
    half_state_dict: StateDict
    generation: dict[str, Any] | None = None
    header: Mapping[str, Any] = MappingProxyType({})
    static_inputs: StaticInputs | None = None


def is_training_checkpoint(path: Path) -> bool:
    """Whether `path` is or contains a training checkpoint, also a damaged one."""
    return _is_step_folder(path) or bool(steps_in(path)) or (path / CHECKPOINTS_FOLDER).is_dir()


def find_checkpoint(path: Path) -> Path:
    """The step folder for `path`: itself, or the newest complete one of a run or its `checkpoints/`.

    Raises:
        UserError: there is none.
    """
    if _is_step_folder(path):
        return path
    for folder in (path, path / CHECKPOINTS_FOLDER):
        if steps := complete_steps(folder):
            return folder / step_name(steps[-1])
    raise UserError(
        f"no complete training checkpoint in {path}: name a run's folder or a step-… folder in it"
    )


def read_checkpoint(folder: Path) -> TrainingCheckpoint:
    """Verify and read the checkpoint that `find_checkpoint` finds.

    Raises:
        UserError: there is none, a file is missing or damaged, or the format is another one.
    """
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


def stored_config(step: Path) -> dict[str, Any]:
    """Fields of the Hugging Face configuration of the model in a step folder; none if it is not ours.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        ours = CheckpointContents(step).header.get(OUR_KEY)
        config: dict[str, Any] = ours["hf_config"] if isinstance(ours, dict) else {}
    return config


def stored_static_inputs(step: Path) -> StaticInputs | None:
    """What was recorded of the layers' inputs in a step folder; None: nothing, or it is not ours.

    Raises:
        UserError: it is damaged.
    """
    with reading(f"checkpoint {step}"):
        ours = CheckpointContents(step).header.get(OUR_KEY)
        return _static_inputs(ours) if isinstance(ours, dict) else None


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
    )


def _static_inputs(ours: Mapping[str, Any]) -> StaticInputs | None:
    stored = ours.get("static_inputs")
    return None if stored is None else StaticInputs.from_dict(stored)


def write_start_checkpoint(
    model: PreTrainedModel, recipe: Recipe | str, folder: Path, *, tokenizer_files: Path | None = None
) -> Path:
    """Write the weights of a plain model as a checkpoint to start training from.

    Args:
        model: an unconverted Hugging Face model; it does not change. Weights are stored in its dtype.
        recipe: the recipe of the conversion.
        folder: a new folder, for `step-00000000/`, `latest` and `tokenizer/`.
        tokenizer_files: folder whose tokenizer files, if any, are copied unchanged next to the step.

    Returns:
        The step folder.

    Raises:
        UserError: `folder` exists and is not empty or cannot be written; the recipe matches nothing.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    empty = random_model(config, seed=0, device="meta")
    empty.generation_config = copy.deepcopy(model.generation_config)
    state = model.state_dict(keep_vars=True)
    weights = {group[0]: state[group[0]] for group in tied_names(state)}
    dtype = widest(each.dtype for each in weights.values())
    conversion = start_conversion(
        empty,
        weights,
        recipe,
        source=Path(folder),
        dtype=dtype,
        key={"model": uuid.uuid4().hex},  # of an interruption nothing is used: weights in memory have no name
        tokenizer_files=tokenizer_files,
        may_be_nonfinite=True,
    )
    conversion.run(Path(folder))
    return Path(folder) / step_name(0)


def start_conversion(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    recipe: Recipe | str,
    *,
    source: Path,
    dtype: torch.dtype,
    key: Mapping[str, Any],
    tokenizer_files: Path | None = None,
    shard_size: int = SHARD_SIZE,
    may_be_nonfinite: bool = False,
) -> Conversion:
    """The conversion of a plain model's weights into a checkpoint to start from, one tensor at a time.

    Args:
        model: of the weights' configuration, on the meta device; becomes a converted one.
        weights: by the model's names and in its layout, of tied names only the first; read on access.
        recipe: the recipe of the training.
        source: where the weights are from, for messages.
        dtype: of the stored weights.
        key: see `Conversion`.
        tokenizer_files: see `write_start_checkpoint`.
        shard_size: limit of the bytes of tensors in a file.
        may_be_nonfinite: also write weights that are NaN or infinite.

    Raises:
        UserError: names differ, or the recipe matches nothing; on reading, a weight is not finite.
    """
    hf_config = model.config.to_dict()
    prepare_for_training(model)
    report = convert(model, recipe)
    layers = bit_layers(model)
    with parameter_layout(model):
        expected = model.state_dict(keep_vars=True)
    groups = tied_names(expected)
    specs = tuple(TensorSpec(group[0], dtype, tuple(expected[group[0]].shape)) for group in groups)
    given = {spec.name for spec in specs if not _is_factor(spec.name)}
    names = set(weights)  # a mapping that reads on access reads to answer whether it has a name
    refuse_differences(given - names, names - given, str(source))
    shapes = {spec.name: spec.shape for spec in specs}

    def read(name: str) -> torch.Tensor:
        if _is_factor(name):
            return torch.zeros(shapes[name], dtype=dtype)  # of a layer that is not split yet
        weight = weights[name].detach()
        if not may_be_nonfinite:
            refuse_nonfinite_weight(name, weight, str(source))
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.is_transposed and name.endswith(".weight"):
            weight = weight.t()
        if tuple(weight.shape) != shapes[name]:
            raise misshapen(str(source), name, weight.shape, shapes[name])
        return weight.to(dtype)

    ours = {
        "format": FORMAT,
        "step": 0,
        "hf_config": hf_config,
        "recipe": report.recipe.to_dict(),
        "config": {},
        "generation": stored_generation(model),
    }
    tied = {other: group[0] for group in groups for other in group[1:]}
    conversion = Conversion(
        source=source,
        tensors=specs,
        read=read,
        read_dtype=dtype,
        finish=lambda draft, facts: _finish_start(draft, facts, conversion, ours, tied, tokenizer_files),
        key={**key, "recipe": ours["recipe"], "dtype": str(dtype)},
        place=step_name(0),
        stem="weights",
        shard_size=shard_size,
    )
    return conversion


def _finish_start(
    draft: Path,
    facts: Sequence[FileFacts],
    conversion: Conversion,
    ours: Mapping[str, Any],
    tied: Mapping[str, str],
    tokenizer_files: Path | None,
) -> None:
    """Write everything but the weights of a checkpoint to start from."""
    step = draft / step_name(0)
    parameters = tuple(
        StoredParameter(
            name=each.name,
            shape=each.shape,
            dtype=str(each.dtype).removeprefix("torch."),
            weight=(shard.file, each.name),
        )
        for shard in conversion.shards
        for each in shard.tensors
    )
    layout = Layout(stage=0, data_size=1, slices=(Slice(parameters=parameters),), tied=tied)
    header: dict[str, Any] = {OUR_KEY: ours, ENGINE_KEY: {LAYOUT_KEY: layout.to_dict()}}
    path = step / HEADER_FILE
    header[ORIGIN_KEY] = origin_of(header, path, None)
    torch.save(header, path)
    write_manifest(step, facts)
    (draft / LATEST).write_text(step.name, encoding="utf-8")
    if tokenizer_files is not None:
        copy_tokenizer(tokenizer_files, draft / TOKENIZER_FOLDER, with_config=True)


def _is_factor(name: str) -> bool:
    return name.rpartition(".")[2] in SPLIT_NAMES


def _is_step_folder(path: Path) -> bool:
    if is_step_name(path.name) and path.is_dir():
        return True
    return any((path / name).is_file() for name in FIRST_FILES)
