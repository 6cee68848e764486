"""Checks before the first cell is trained: what would fail, or could not be compared, only afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megalowbit.errors import UserError, shown
from megalowbit.hf.checkpoint import build_model
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.components.loss_guard import LossGuardSettings
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.evaluation import read_tokens

# Settings of `megalowbit.data` that do not change a batch of training; of `validation`, `share` may.
NOT_CONTENT = ("cache_dir", "workers", "build_timeout", "max_bad_records", "validation")


def check_pairs(chosen: Sequence[Cell], every: Sequence[Cell]) -> None:
    """Check the chosen cells against those of the baseline; one seed and text stands for all.

    Args:
        chosen: cells that will be run.
        every: all cells of the study.

    Raises:
        UserError: a recipe or replica would read other batches, from the start or after a rollback.
    """
    for cell in {(each.size.name, each.steps, each.label): each for each in reversed(chosen)}.values():
        baseline = next(each for each in every if _is_baseline_of(each, cell))
        for each in (cell, baseline):
            guard = each.config.settings.of(LossGuardSettings)
            if guard is not None and guard.rolls_back:
                raise UserError(
                    f"{each.name}: a rollback of megalowbit.loss_guard goes on with new batches, which no "
                    'other cell has: use "stop" in its place'
                )
        now, before = dict(_batches(cell)), dict(_batches(baseline))
        for key in [*before, *(key for key in now if key not in before)]:
            if now.get(key) != before.get(key):
                own, other = shown(now.get(key)), shown(before.get(key))
                raise UserError(
                    f"{cell.name}: {key} is {own}, and {other} in {baseline.name}: the cells of a pair read "
                    "the same batches, so set it for the size or for the study"
                )


def check_layers(cells: Sequence[Cell]) -> None:
    """Convert a model without weights by each recipe at each size.

    Raises:
        UserError: a recipe does not fit the model, for example because it names layers that there are not.
    """
    for cell in {(each.size.name, each.label): each for each in reversed(cells)}.values():
        model = build_model(cell.config.settings.model, seed=0, device="meta")
        try:
            convert(model, recipe_of(cell.config.recipe), rank=0)
        except UserError as error:
            raise UserError(f"size {cell.size.name!r}, {cell.label!r}: {error}") from None


def check_heldout(cell: Cell) -> None:
    """Check that the held-out text of a cell has a whole sequence.

    Raises:
        UserError: it is shorter.
    """
    try:
        read_tokens(cell.config.settings.data, cell.heldout)
    except UserError as error:
        raise UserError(
            f"text {cell.text!r}, held out: {error}; or raise `heldout_bytes` of the study and remove "
            f"{cell.text_folder}"
        ) from None


def _is_baseline_of(other: Cell, cell: Cell) -> bool:
    place, own = ((each.size.name, each.steps, each.text, each.seed) for each in (other, cell))
    return other.label == cell.study.baseline and place == own


def _batches(cell: Cell) -> Iterator[tuple[str, Any]]:
    """Settings on which the batches depend."""
    resolved = cell.config.to_dict()
    yield "train_batch_size", resolved["train_batch_size"]
    data = resolved["megalowbit"]["data"]
    yield "megalowbit.data.validation.share", (data.get("validation") or {}).get("share")
    for key, value in data.items():
        if key not in NOT_CONTENT:
            yield f"megalowbit.data.{key}", value
