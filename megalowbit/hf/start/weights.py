"""The model of a run without its weights, and the weights one tensor at a time.

`start_model` builds the model that `checkpoint.build_model` would build, with parameters on the meta device.
Its `StartWeights` gives the values of each parameter: random ones are computed again, those of a folder are
read. They are bitwise the weights of `build_model`. One process can therefore hold one tensor at a time and
send it to the others.

A process opens the weights only if it reads them: what verifies a checkpoint, or compares tied weights, is
done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalowbit.checkpoints.shards import reading
from megalowbit.families.outliers import channels_of, weights_with_outliers
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens, padded_rows
from megalowbit.hf.checkpoint import PlainWeights, checkpoint_of, source_of, trainable, unpadded_config
from megalowbit.hf.folders.config_file import config_from_dict
from megalowbit.hf.folders.stored_weights import StoredWeights, refuse_nonfinite_weight
from megalowbit.hf.generation import read_generation, restore_generation
from megalowbit.hf.model import random_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.start.recorded_init import RandomWeights, record_initialization
from megalowbit.hf.training_checkpoint import (
    find_checkpoint,
    is_training_checkpoint,
    read_checkpoint,
    stored_header,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class StartWeights:
    """The weights of a model whose parameters are on the meta device.

    Attributes:
        shapes: shape of each full weight, by its name in the plain model; of tied names only the first.
        open: makes the weights readable in this process: fp32, in the layout of the plain model, each
            computed or read on access. None: weights are zeros, because a checkpoint is loaded later.
    """

    shapes: Mapping[str, tuple[int, ...]]
    open: Callable[[], Mapping[str, Tensor]] | None


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What a run changes in the weights it starts from.

    Attributes:
        where: the source of the weights, for messages.
        is_checked: whether they must be finite.
        outliers: names of the weights whose `channels` are multiplied by `factor`.
        padded: names of embedding and output projection, whose rows after the first `tokens` stand for none.
        rows: their rows with padding.
    """

    where: str
    is_checked: bool
    outliers: frozenset[str]
    channels: Tensor | None
    factor: float
    padded: frozenset[str]
    tokens: int
    rows: int

    @torch.no_grad()
    def apply(self, name: str, value: Tensor) -> Tensor:
        """The weight to train, in fp32."""
        value = value.to(torch.float32)
        if self.is_checked:
            refuse_nonfinite_weight(name, value, self.where)
        if name in self.outliers:
            value = value.clone()
            value[..., self.channels] *= self.factor
        if name in self.padded and (value.shape[0], self.tokens) != (self.rows, self.rows):
            value = padded_rows(value, self.tokens, self.rows)
        return value


class _Changed(Mapping[str, Tensor]):
    """Weights with changes, on access."""

    def __init__(self, weights: Mapping[str, Tensor], changes: _Changes) -> None:
        self._weights, self._changes = weights, changes

    def __getitem__(self, name: str) -> Tensor:
        return self._changes.apply(name, self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def start_model(
    settings: ModelSettings, *, seed: int, reads_weights: bool = True
) -> tuple[PreTrainedModel, StartWeights]:
    """The model that `settings` describe, with parameters on the meta device, and its weights.

    Args:
        settings: the `"model"` section.
        seed: see `build_model`.
        reads_weights: whether anything needs the weights; if a checkpoint is loaded afterwards, nothing does.

    Raises:
        UserError: see `build_model`. Errors of the weights themselves are raised when they are opened or
            read.
    """
    if settings.config is not None:
        model, weights = _empty(unpadded_config(settings), str(settings.config), seed)
        opened: Callable[[], Mapping[str, Tensor]] = partial(_same, weights)
    else:
        model, opened = _from_folder(settings)
    changes = _changes(model, settings, seed)
    trainable(model, settings)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return model, StartWeights(shapes, partial(_open, opened, changes) if reads_weights else None)


def _empty(config: PretrainedConfig, where: str, seed: int = 0) -> tuple[PreTrainedModel, RandomWeights]:
    """A plain model with buffers but without weights, and its random weights, computed if they are read."""
    return record_initialization(partial(random_model, config, seed=seed, where=where), seed=seed)


def _same(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return weights


def _open(opened: Callable[[], Mapping[str, Tensor]], changes: _Changes) -> Mapping[str, Tensor]:
    return _Changed(opened(), changes)


def _changes(model: PreTrainedModel, settings: ModelSettings, seed: int) -> _Changes:
    """What a run with these settings changes in the weights of a plain model."""
    names, size = family(model.config.model_type), num_tokens(model.config)
    multiple, outliers = settings.pad_vocab_to_multiple_of, settings.outliers
    changed: frozenset[int] = frozenset()
    if outliers is not None:
        changed = frozenset(id(each) for each in weights_with_outliers(model, names, outliers))
    return _Changes(
        where=str(source_of(settings)),
        is_checked=settings.config is None,
        outliers=frozenset(name for name, each in model.named_parameters() if id(each) in changed),
        channels=None if outliers is None else channels_of(model, outliers, seed=seed),
        factor=1.0 if outliers is None else outliers.factor,
        padded=frozenset({f"{names.tokens}.weight", f"{names.head}.weight"}),
        tokens=size,
        rows=-(-size // multiple) * multiple if multiple else size,
    )


def _from_folder(settings: ModelSettings) -> tuple[PreTrainedModel, Callable[[], Mapping[str, Tensor]]]:
    """The plain model of a checkpoint, without weights, and a function that opens them."""
    folder = checkpoint_of(settings)
    where = str(folder)
    if not is_training_checkpoint(folder):
        config = unpadded_config(settings)
        config.name_or_path = where  # as `from_pretrained` sets it
        model, _ = _empty(config, where)
        read_generation(model, folder)
        return model, partial(_open_folder, settings)
    step = find_checkpoint(folder)
    header = stored_header(step)
    if "hf_config" not in header:
        read_checkpoint(folder)  # says what it is instead
    with reading(f"checkpoint {step}"):
        model, _ = _empty(config_from_dict(header["hf_config"], settings.overrides, where), where)
        restore_generation(header.get("generation"), model)
    return model, partial(_open_checkpoint, settings)


def _open_folder(settings: ModelSettings) -> Mapping[str, Tensor]:
    config, folder = unpadded_config(settings), checkpoint_of(settings)
    model = random_model(config, seed=0, device="meta", where=str(folder))
    return StoredWeights(folder, model, family(config.model_type).former_buffers)


def _open_checkpoint(settings: ModelSettings) -> Mapping[str, Tensor]:
    folder = checkpoint_of(settings)
    stored = read_checkpoint(folder)
    config = config_from_dict(stored.hf_config, settings.overrides, str(folder))
    model = random_model(config, seed=0, device="meta", where=str(folder))
    return PlainWeights(stored, model, str(folder))
