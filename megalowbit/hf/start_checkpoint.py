"""Checkpoints to start training from: weights only, written tensor by tensor into safetensors files.

`training_checkpoint` reads them like those of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalowbit.checkpoints.layout import ENGINE_KEY, LAYOUT_KEY, Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import ORIGIN_KEY, origin_of
from megalowbit.durable_files import LATEST, FileFacts, step_name, write_manifest
from megalowbit.hf.folders.conversion import Conversion
from megalowbit.hf.folders.shards import SHARD_SIZE, TensorSpec
from megalowbit.hf.folders.stored_weights import (
    misshapen,
    refuse_differences,
    refuse_nonfinite_weight,
    tied_names,
)
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.folders.tokenizer_files import copy_tokenizer
from megalowbit.hf.generation import prepare_for_training, stored_generation
from megalowbit.hf.training_checkpoint import FORMAT, HEADER_FILE, OUR_KEY
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.state_dict_layout import parameter_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
) -> Conversion:
    """The conversion of a plain model's weights into a checkpoint to start from, one tensor at a time.

    Args:
        model: of the weights' configuration, on the meta device; becomes a converted one.
        weights: by the model's names and in its layout, of tied names only the first; read on access.
        recipe: the recipe of the training.
        source: where the weights are from, for messages.
        dtype: of the stored weights.
        key: see `Conversion`.
        tokenizer_files: folder whose tokenizer files, if any, are copied unchanged next to the step.
        shard_size: limit of the bytes of tensors in a file.

    Raises:
        UserError: names differ, or the recipe matches nothing; on reading, a weight is not finite.
    """
    hf_config = model.config.to_dict()
    prepare_for_training(model)
    report = convert(model, recipe)
    written = _StartWeights(model, weights, source, dtype)
    ours = {
        "format": FORMAT,
        "step": 0,
        "hf_config": hf_config,
        "recipe": report.recipe.to_dict(),
        "config": {},
        "generation": stored_generation(model),
    }
    conversion = Conversion(
        source=source,
        tensors=written.specs,
        read=written.read,
        read_dtype=dtype,
        finish=lambda draft, facts: _finish_start(
            draft, facts, conversion, ours, written.tied, tokenizer_files
        ),
        key={**key, "recipe": json.dumps(ours["recipe"]), "dtype": str(dtype)},  # the order counts
        place=step_name(0),
        stem="weights",
        shard_size=shard_size,
    )
    return conversion


class _StartWeights:
    """The weights of a plain model as a checkpoint to start from stores them.

    For the arguments see `start_conversion`; `model` is converted.

    Attributes:
        specs: of all tensors.
        tied: each name that has no tensor of its own, with the name of its tensor.
    """

    def __init__(
        self, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], source: Path, dtype: torch.dtype
    ) -> None:
        self._weights, self._source, self._dtype = weights, source, dtype
        self._layers = bit_layers(model)
        with parameter_layout(model):
            expected = model.state_dict(keep_vars=True)
        groups = tied_names(expected)
        self.tied = {other: group[0] for group in groups for other in group[1:]}
        self.specs = tuple(TensorSpec(group[0], dtype, tuple(expected[group[0]].shape)) for group in groups)
        self._shapes = {spec.name: spec.shape for spec in self.specs}
        given = {name for name in self._shapes if not _is_factor(name)}
        names = set(weights)  # a mapping that reads on access reads to answer whether it has a name
        refuse_differences(given - names, names - given, str(source))

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; factors are zero, as those of a layer that is not split yet.

        Raises:
            UserError: it is not finite, or has another shape than the model's.
        """
        if _is_factor(name):
            return torch.zeros(self._shapes[name], dtype=self._dtype)
        weight = self._weights[name].detach()
        refuse_nonfinite_weight(name, weight, str(self._source))
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.is_transposed and name.endswith(".weight"):
            weight = weight.t()
        if tuple(weight.shape) != self._shapes[name]:
            raise misshapen(str(self._source), name, weight.shape, self._shapes[name])
        return weight.to(self._dtype)


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
