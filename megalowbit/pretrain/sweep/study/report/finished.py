"""A finished cell of a study: its losses at each step, its times, and what it is paired by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.results import LossMeans, Result

Key = tuple[str, int]  # text and seed


@dataclass(frozen=True)
class Finished:
    """A finished cell and its result."""

    cell: Cell
    result: Result

    @property
    def key(self) -> Key:
        """What it is paired by, within a size and length."""
        return (self.cell.text, self.cell.seed)

    @property
    def is_diverged(self) -> bool:
        """Whether the run has diverged."""
        return self.result.diverged_at is not None

    @cached_property
    def losses(self) -> LossMeans:
        """The training losses, in blocks."""
        return self.result.loss_means(self.cell.block)

    def loss_to(self, step: int) -> float:
        """Mean training loss of the window that ends with this step; NaN if the run has diverged by then.

        `step` is a multiple of the cell's block.
        """
        diverged_at = self.result.diverged_at
        if diverged_at is not None and step >= diverged_at:
            return math.nan
        return self.losses.mean_to(step, self.cell.study.window)

    def heldout(self, precision: str) -> float:
        """Held-out loss in `bf16` or `own` precision; NaN if the run diverged or it is not finite."""
        losses = self.result.heldout
        loss = None if losses is None else getattr(losses, precision)
        return math.nan if loss is None else loss

    def cpu_seconds(self) -> float:
        """CPU seconds of a step; NaN if a part of the run was killed, because those of that part are lost."""
        cost, steps = self.result.cost, self.losses.steps
        return cost.cpu_seconds / steps if steps and cost.steps == steps and cost.cpu_seconds else math.nan

    def ran_like(self, other: Finished) -> bool:
        """Whether times compare: equal threads, and one kind of processor with equal GEMMs.

        Of earlier versions, which recorded no instructions, processors of one name are taken for one kind.
        """
        own, their = self.result.made_with, other.result.made_with
        is_same = own.same_place(their)
        is_like = is_same or (is_same is None and own.units == their.units)
        return is_like and self.result.cost.threads == other.result.cost.threads


def finished_cells(cells: Sequence[Cell]) -> list[Finished]:
    """The cells that are finished, with their results.

    Raises:
        UserError: a result is damaged, or was kept in blocks that do not fit the study's windows.
    """
    found = []
    for cell in cells:
        if (result := cell.result()) is not None:
            cell.check_block(result, cell.name)
            found.append(Finished(cell, result))
    return found


def check_equal_tokens(cells: Sequence[Finished]) -> None:
    """Check that cells that are compared have read the same number of tokens.

    Raises:
        UserError: they have not.
    """
    counts = {each.result.tokens: each.cell.name for each in cells if not each.is_diverged}
    if len(counts) > 1:
        listed = "; ".join(f"{name}: {tokens:,}" for tokens, name in counts.items())
        raise UserError(f"cells of one size and length have read different numbers of tokens ({listed})")
