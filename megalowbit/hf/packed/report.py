"""The report of a packed export: what was packed, and which blocks are not those of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        notes: about the run, see `notes_about`.
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
                f"WARNING: {counted(len(self.rounded), 'layer')} cannot have the tensor scale of the layers "
                "that servers fuse with them, so blocks were rounded again:"
            )
            lines += [f"  {each}" for each in self.rounded]
        else:
            lines.append("all packed weights are bit for bit those of the recipe's forward")
        return "\n".join([*lines, *(f"WARNING: {each}" for each in self.notes)])


def notes_about(header: Mapping[str, Any]) -> tuple[str, ...]:
    """What a checkpoint's header says about forwards that were not those of its recipe."""
    progress = header.get("progress") or {}
    notes = []
    if (progress.get("late_switch") or {}).get("since"):
        notes.append(
            "the late switch of the run ended the rounding in the forward before this step, but the packed "
            "model rounds, so its loss is not that of the last steps"
        )
    if progress.get("speculation"):
        notes.append("speculation chose the precision of each product, and here all layers have one format")
    return tuple(notes)
