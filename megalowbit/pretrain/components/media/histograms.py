"""Histograms of the weights' block maxima, by layer: how the range of block scales is used.

A low-bit format stores a scale for each block of a weight, which follows the block's largest magnitude. The
histogram counts these maxima by powers of two. Blocks that drift to the left lose their scale to underflow, a
tail to the right sets the scale of the whole tensor and pushes the others down. It costs one pass over the
weights, and one all-reduce and host read of all layers together.

The counts are exact on any layout: ranks with shards count their own blocks, stages their own layers, and at
ZeRO stage 3 weights are gathered one at a time. Blocks have 16 elements along the input features of a shard,
whatever the recipe. Not covered: weights that are split into parameters, of which the residual is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megalowbit.errors import UserError, shown
from megalowbit.pretrain.components.base import Component, RunParts
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Histogram, Medium
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from torch import Tensor

    from megalowbit.layers.recipe import Recipe
    from megalowbit.telemetry.sinks.jsonl import JsonlFile

KEY = "megalowbit.histograms"
NAME = "weight_block_max_log2"
BLOCK = 16
LOWEST, HIGHEST = -40, 24  # powers of two; the first bin also has smaller maxima and 0, the last all others
NUM_BINS = HIGHEST - LOWEST
EDGES = tuple(float(power) for power in range(LOWEST, HIGHEST + 1))


class HistogramsSettings(SettingsModel):
    """How often histograms are recorded."""

    every: int = Field(
        default=500,
        ge=1,
        description="interval between histograms. The last step always has some",
        json_schema_extra=unit("steps"),
    )


class Histograms(Component):
    """Records the block maxima of all low-bit weights.

    Args:
        settings: how often.
        engine: DeepSpeed's engine around the converted model.
        total_steps: optimizer steps of the run.
    """

    key = "histograms"
    settings_class = HistogramsSettings
    description = "record histograms of the weights' block maxima by layer; off unless set"
    may_change = (KEY, f"{KEY}.*")
    records = ("histograms.jsonl",)

    def __init__(self, settings: HistogramsSettings, engine: Any, *, total_steps: int) -> None:
        from megalowbit.distributed.agreement import gather
        from megalowbit.layers.conversion.convert import bit_layers

        self._settings, self._engine, self._total_steps = settings, engine, total_steps
        self._layers = {layer.layer_name: layer for layer in bit_layers(engine.module).values()}
        # of all stages, in their order
        self._names = list(dict.fromkeys(name for names in gather(list(self._layers)) for name in names))
        self._file: JsonlFile | None = None  # on the main process
        self._counts: list[list[int]] = []  # of this step, by layer

    @classmethod
    def check_recipe(cls, settings: HistogramsSettings, recipe: Recipe) -> None:
        """Reject histograms of layers that are not there."""
        if not recipe.quantizes:
            raise UserError(f"recipe {shown(recipe.name)} has no low-bit layers: leave it out")

    @classmethod
    def build(cls, settings: HistogramsSettings, parts: RunParts) -> Histograms:
        return cls(settings, parts.engine, total_steps=parts.run.steps)

    def startup_line(self) -> str:
        return f"histogram block maxima of {len(self._names)} weights, every {self._settings.every} steps"

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        self._counts = []
        if step != self._total_steps and step % self._settings.every:
            return ()
        self._counts = self._count()
        if self._file is not None:
            for name, counts in zip(self._names, self._counts, strict=True):
                self._file.append({"step": step, "layer": name, "of": NAME, **trimmed(counts)})
        return ()

    def _count(self) -> list[list[int]]:
        """The counts of each layer on every rank; collective."""
        import torch

        from megalowbit.distributed import collectives, process_group
        from megalowbit.engine.parameters.full_weights import gathered

        counts = torch.zeros(len(self._names), NUM_BINS, dtype=torch.int64, device=self._engine.device)
        for row, name in enumerate(self._names):
            if name not in self._layers:
                continue
            with gathered(self._layers[name].weight):
                weight = self._layers[name].weight.detach()
                if self._engine.process_grid.data_rank == 0:  # other data ranks have the same
                    counts[row] = count_block_maxima(weight)
        if process_group.world_size() > 1:
            counts = counts.to(process_group.exchange_device(None, counts.device))
            collectives.all_reduce(counts)
        read: list[list[int]] = counts.tolist()
        return read

    def media(self) -> Sequence[Medium]:
        return [
            Histogram(name=f"{NAME}/{name}", edges=EDGES, counts=tuple(counts))
            for name, counts in zip(self._names, self._counts, strict=False)  # none in most steps
        ]

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        from megalowbit.telemetry.sinks.jsonl import JsonlFile  # it imports torch

        self._file = JsonlFile(folder / self.records[0], resume_step=resume_step)

    def close_records(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def trimmed(counts: Sequence[int]) -> dict[str, Any]:
    """The counts without zeros at either end, and the power of two at which the first of them begins."""
    found = [index for index, count in enumerate(counts) if count] or [0]
    return {"first": LOWEST + found[0], "counts": list(counts[found[0] : found[-1] + 1])}


def count_block_maxima(weight: Tensor) -> Tensor:
    """How many blocks of each row have a largest magnitude in [2^k, 2^(k+1)), for k from `LOWEST`.

    Args:
        weight: (out_features, in_features); the last block of a row may be shorter.

    Returns:
        (`NUM_BINS`,) int64, on the weight's device.
    """
    import torch

    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -width % BLOCK))
    maxima = padded.reshape(rows, -1, BLOCK).amax(-1).flatten()
    # frexp: x = m · 2^e with m in [0.5, 1), so floor(log2(x)) = e - 1
    powers = torch.frexp(maxima).exponent.long() - 1
    powers = powers.where(maxima > 0, LOWEST).where(torch.isfinite(maxima), HIGHEST)
    return torch.bincount((powers - LOWEST).clamp(0, NUM_BINS - 1), minlength=NUM_BINS)
