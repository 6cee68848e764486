"""Reports of a packed export: what was packed, which blocks were rounded again, the errors of weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalowbit.values import counted


@dataclass(frozen=True)
class RoundedLayer:
    """A layer some of whose blocks were rounded again, see `fused_groups`.

    Attributes:
        name: its name.
        num_rounded: blocks that were rounded again.
        num_blocks: all blocks.
        relative_change: norm of the difference that this made, divided by the norm of the weight.
    """

    name: str
    num_rounded: int
    num_blocks: int
    relative_change: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_rounded:,} of {counted(self.num_blocks, 'block')}, "
            f"a change of {self.relative_change:.1e} of the weight's norm"
        )


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Result of a packed export; its text is a few lines.

    Attributes:
        layout: name of the layout.
        format: name of the number format.
        precision: `w4a16` or `w4a4`.
        num_packed: number of packed layers.
        ignored: names of linear layers in high precision.
        nbytes: bytes of all tensors.
        rounded: layers with values other than those of the recipe's forward.
        notes: see `note_about_wide` and `notes_about_run`.
    """

    layout: str
    format: str
    precision: str
    num_packed: int
    ignored: tuple[str, ...]
    nbytes: int
    rounded: tuple[RoundedLayer, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = f"; {counted(len(self.ignored), 'linear layer')} in bf16" if self.ignored else ""
        lines = [
            f"{counted(self.num_packed, 'layer')} packed as {self.format.upper()} ({self.precision}, "
            f"{self.layout}), {self.nbytes:,} bytes in all{kept}"
        ]
        if self.rounded:
            lines.append(
                "WARNING: servers fuse layers and give them one tensor scale, so some blocks of "
                f"{counted(len(self.rounded), 'layer')} were rounded again:"
            )
            lines += [f"  {each}" for each in self.rounded]
        else:
            lines.append("all packed weights are bit for bit those of the recipe's forward")
        return "\n".join([*lines, *(f"WARNING: {each}" for each in self.notes)])


def note_about_wide(layers: Collection[str]) -> tuple[str, ...]:
    """What is said about layers that the recipe rounds to 8 bits; nothing without any."""
    if not layers:
        return ()
    return (
        f"{counted(len(layers), 'layer')} with 8 bits in the recipe's forward are written in bf16: a packed "
        "model has one format",
    )


def notes_about_run(header: Mapping[str, Any], *, has_one_format: bool = True) -> tuple[str, ...]:
    """What a checkpoint's header says about forwards that were not those of its recipe.

    Args:
        header: of the checkpoint.
        has_one_format: whether the packed model rounds all layers that the recipe rounds.
    """
    progress = header.get("progress") or {}
    notes = []
    if (progress.get("late_switch") or {}).get("since"):
        notes.append(
            "the late switch of the run ended the rounding in the forward before this step, but the packed "
            "model rounds, so its loss is not that of the last steps"
            + ": `evaluate --forward recipe` gives it"
            * has_one_format
        )
    if progress.get("speculation"):
        notes.append("speculation chose the precision of each product, and here all layers have one format")
    return tuple(notes)


@dataclass(frozen=True)
class WeightError:
    """How far the packed weight of a layer is from the given one.

    Attributes:
        name: of the layer.
        snr_db: signal-to-noise ratio, 10 · log10(Σ w² / Σ (ŵ − w)²); infinite if all values are exact.
        largest: largest |ŵ − w|, divided by the largest |w|. An element alone may lose all of its value, so
            its own magnitude is no measure.
    """

    name: str
    snr_db: float
    largest: float


def weight_error(name: str, weight: Tensor, packed: Tensor) -> WeightError:
    """The error of one layer, in float64.

    Args:
        name: of the layer.
        weight: as given.
        packed: of the same shape, as a server decodes it.
    """
    weight = weight.to(torch.float64)
    error = packed.to(torch.float64) - weight
    signal, noise = (float(each.square().sum()) for each in (weight, error))
    if noise == 0.0:
        return WeightError(name, math.inf, 0.0)
    snr_db = 10 * math.log10(signal / noise) if signal else -math.inf
    largest = float(weight.abs().max())
    return WeightError(name, snr_db, float(error.abs().max()) / largest if largest else math.inf)


def worst_errors(errors: Sequence[WeightError], count: int) -> str:
    """A table of the layers with the lowest signal-to-noise ratio."""
    chosen = sorted(errors, key=lambda each: each.snr_db)[:count]
    width = max(len(each.name) for each in chosen)
    lines = [f"{'layer':{width}}   SNR (dB)   largest error / largest weight"]
    lines += [f"{each.name:{width}}   {each.snr_db:8.2f}   {each.largest:.4f}" for each in chosen]
    if len(errors) > count:
        lines.append(f"… and {counted(len(errors) - count, 'layer')} with a higher SNR")
    return "\n".join(lines)
