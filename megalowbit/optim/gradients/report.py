"""The result of one optimizer step: applied or skipped, norm, zeros, scale, and the location of an overflow.

A report is a tuple `(applied, grad_norm, num_zeros)`, as Megatron's optimizers return it, with further
attributes. All numbers are plain Python; the step has read them from the device in one copy. `optim.step`
computes them, and `locate_overflow` finds the location.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megalowbit.distributed import process_group


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """Location of a step's infinite or NaN gradients.

    Attributes:
        tensor: name of the first such gradient in the order of backward.
        rank: its rank in the whole job; None if gradients had been averaged before they were checked, which
            spreads an infinity to all ranks of the average.
        num_tensors: number of non-finite gradients on that rank.
        num_gradients: number of gradients on that rank.
        ranks: all ranks with such gradients, ascending; if `rank` is None, the ranks where it may have begun.
    """

    tensor: str
    rank: int | None
    num_tensors: int
    num_gradients: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        """`overflow in transformer.h.3.mlp.c_fc.weight on rank 5`, and how far it has spread."""
        where = f"overflow in {self.tensor}"
        if self.rank is not None:
            where += f" on rank {self.rank}"
        elif 1 < len(self.ranks) < process_group.world_size():
            where += f" on one of the {len(self.ranks)} ranks from {self.ranks[0]} to {self.ranks[-1]}"
        more = []
        if self.num_tensors == self.num_gradients > 1:
            more.append(f"and in all {self.num_gradients} gradients: check the loss and the forward pass")
        elif self.num_tensors > 1:
            more.append(f"first of {self.num_tensors} of {self.num_gradients} gradients")
        if self.rank is not None and len(self.ranks) > 1:
            more.append(f"{len(self.ranks)} ranks overflowed")
        return f"{where} ({', '.join(more)})" if more else where


class StepReport(tuple[bool, "float | None", "int | None"]):
    """`(applied, grad_norm, num_zeros)`; a skipped step is `(False, None, None)`.

    Attributes:
        loss_scale: S by which this step's gradients were multiplied; 1 without a scaler.
        overflow: where gradients were not finite; None for an applied step.
        also_read: the numbers of the optimizer's `also_read`; empty without it.
    """

    loss_scale: float
    overflow: Overflow | None
    also_read: tuple[float, ...]

    def __new__(
        cls,
        *,
        is_applied: bool,
        grad_norm: float | None = None,
        num_zeros: int | None = None,
        loss_scale: float = 1.0,
        overflow: Overflow | None = None,
        also_read: tuple[float, ...] = (),
    ) -> StepReport:
        report = super().__new__(cls, (True, grad_norm, num_zeros) if is_applied else (False, None, None))
        report.loss_scale = loss_scale
        report.overflow = overflow
        report.also_read = also_read
        return report

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        """Arguments for copies and pickles."""
        names = ("is_applied", "grad_norm", "num_zeros", "loss_scale", "overflow", "also_read")
        return (), {name: getattr(self, name) for name in names}

    @property
    def is_applied(self) -> bool:
        """Whether the weights were updated."""
        return self[0]

    @property
    def grad_norm(self) -> float | None:
        """Norm of the unscaled gradients before clipping; None for a skipped step."""
        return self[1]

    @property
    def num_zeros(self) -> int | None:
        """Gradient elements that were exactly zero; None if not counted or skipped."""
        return self[2]

    def __str__(self) -> str:
        """One line for a log."""
        if not self.is_applied:
            return f"skipped at loss scale {_scale_text(self.loss_scale)}" + (
                f": {self.overflow}" if self.overflow else ""
            )
        zeros = f", {self.num_zeros:,} zeros" if self.num_zeros is not None else ""
        return (
            f"applied, gradient norm {self.grad_norm:.4g}{zeros}, loss scale {_scale_text(self.loss_scale)}"
        )


class LastStep:
    """Attributes of an optimizer about its last step.

    Attributes:
        report: the last step's report; None before the first.
        also_read: returns numbers, (n,) float64 on any device, that a step reads together with its own. It is
            called once a step on every rank, after gradients were measured; the report has the numbers.
            None: there are none. May be set between steps.
    """

    report: StepReport | None
    also_read: Callable[[], torch.Tensor] | None = None

    @property
    def found_inf(self) -> bool:
        """Whether the last step was skipped because gradients were infinite or NaN."""
        return self.report is not None and not self.report.is_applied

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradients, unscaled and before clipping; None after a skip."""
        return self.report.grad_norm if self.report is not None else None


def _scale_text(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 8 else f"{scale:g}"
