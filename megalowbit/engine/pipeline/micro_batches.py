"""Converts batches to what pipeline stages accept, and checks them before they are sent.

Only three integer tensors travel between stages, in a fixed order: token ids, mask and positions. Anything
else in a batch is rejected rather than dropped, although a model in a single process may accept it. If there
is no
mask, none may be added: without one, transformers detects packed documents by their positions. Values are
checked on the CPU only, because on other devices the check would wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError, shown
from megalowbit.labels import IGNORED_LABEL

EXTRAS = ("attention_mask", "position_ids")  # may follow `input_ids`, in this order
WHERE = "a batch for a pipeline"

Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Sizes of a model's embeddings.

    Attributes:
        vocabulary: number of tokens.
        positions: number of learned positions; None: positions are not learned.
    """

    vocabulary: int
    positions: int | None


def as_inputs_and_labels(batch: Any) -> tuple[Inputs, Tensor]:
    """Convert a batch, given as a mapping or as a pair, to (inputs, labels).

    Args:
        batch: a mapping with `input_ids` and `labels`, integers of shape (batch, tokens), and optionally
            `attention_mask` of that shape and `position_ids` of that shape or (1, tokens). Or a pair (inputs,
            labels), in which inputs are token ids, alone or followed by mask and positions.

    Returns:
        Token ids, alone or followed by the `EXTRAS`; and labels. Positions without a mask follow a dummy mask
        of shape (batch, 1), which means no mask (see `mask_of`).

    Raises:
        UserError: something is missing, has another shape or type, or is not passed on by stages.
    """
    given = dict(batch) if isinstance(batch, Mapping) else _named(batch)
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("input_ids", "labels"):
        if name not in given:
            raise UserError(f"{WHERE} has no {name!r}, only {', '.join(map(str, given))}: add it")
    unknown = given.keys() - {"input_ids", "labels", *EXTRAS}
    if unknown:
        raise UserError(f"{WHERE} holds {min(map(str, unknown))!r}, which no stage takes: leave it out")
    _check_tensors(given)
    tokens: Tensor = given["input_ids"].long()
    extras = []
    if "attention_mask" in given:
        extras.append(given["attention_mask"].bool().long())
    if "position_ids" in given:
        extras = extras or [torch.ones_like(tokens[:, :1])]
        extras.append(given["position_ids"].long())
    return ((tokens, *extras) if extras else tokens), given["labels"].long()


def mask_of(extras: list[Tensor], num_tokens: int) -> Tensor | None:
    """The attention mask (batch, tokens) among the extras; None if there is none."""
    if not extras or extras[0].shape[1] != num_tokens:
        return None
    return extras[0]


def check_values(inputs: Inputs, labels: Tensor, limits: BatchLimits) -> None:
    """Reject tokens and positions beyond the model's limits; takes the result of `as_inputs_and_labels`."""
    tokens, *extras = inputs if isinstance(inputs, tuple) else (inputs,)
    _check_range("input_ids", tokens, limits.vocabulary, "the vocabulary")
    _check_range("labels", labels, limits.vocabulary, "the vocabulary and -100", ignored=IGNORED_LABEL)
    if limits.positions is None:
        return
    if len(extras) > 1:
        _check_range("position_ids", extras[1], limits.positions, "the learned positions")
    elif tokens.shape[1] > limits.positions:
        raise UserError(
            f"{WHERE} has {tokens.shape[1]} tokens in a sequence, but the model has {limits.positions} "
            "positions: shorten the sequences"
        )


def _named(pair: Any) -> dict[str, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(
            f"{WHERE} = {shown(pair)} is neither a mapping nor (inputs, labels): "
            'give {"input_ids": …, "labels": …}'
        )
    inputs, labels = pair
    values = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    names = ("input_ids", *EXTRAS)
    if len(values) > len(names):
        raise UserError(
            f"{WHERE} has {len(values)} inputs, but stages take only {', '.join(names)}: leave the others out"
        )
    return {**dict(zip(names, values, strict=False)), "labels": labels}


def _check_tensors(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{WHERE} has {name} = {shown(value)}: make it a tensor")
        if name != "attention_mask" and (value.is_floating_point() or value.is_complex()):
            raise UserError(f"{WHERE} has {name} of type {value.dtype}: it must hold integers")
    shape = tuple(given["input_ids"].shape)
    if len(shape) != 2:
        raise UserError(f"{WHERE} has input_ids of shape {shape}: it must be (batch, tokens)")
    for name, value in given.items():
        fitting = {shape, (1, shape[1])} if name == "position_ids" else {shape}
        if tuple(value.shape) not in fitting:
            raise UserError(
                f"{WHERE} has {name} of shape {tuple(value.shape)}: it must have that of input_ids, {shape}"
            )


def _check_range(name: str, values: Tensor, size: int, what: str, ignored: int | None = None) -> None:
    if values.device.type != "cpu":  # the host would wait for the device
        return
    if ignored is not None:
        values = values[values != ignored]
    if not values.numel():
        return
    for value in (int(values.min()), int(values.max())):
        if not 0 <= value < size:
            raise UserError(
                f"{WHERE} has {value} in {name}, which is not in {what}: it must be 0 … {size - 1}"
            )
