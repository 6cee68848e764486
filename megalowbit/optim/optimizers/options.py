"""Options of an optimizer step: each one with its default and its valid values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
import torch.distributed as dist

from megalowbit.errors import UserError, unknown_name
from megalowbit.optim.gradients.norm import GradientNorm
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.timers import StepTimers

BeforeStep = Callable[[float], object]
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


@dataclass(kw_only=True, eq=False, repr=False)
class StepOptions:
    """Keyword arguments of both mixed-precision optimizers; they become attributes of the optimizer.

    Attributes:
        clip_grad: largest gradient norm; 0 turns clipping off.
        log_num_zeros_in_grad: count exact zeros at each step.
        params_have_main_grad: sum gradients in fp32 `main_grad`s, which `.grad` shows after a backward; if
            the parameters have none, a `GradBuffer` is made. False reads `.grad` at `step`, and a parameter
            without one is not updated.
        model_parallel_group: ranks over which norm, zeros and overflow are reduced; None: not sharded.
        tensor_parallel_group: ranks within `model_parallel_group` that hold copies of parameters that are not
            sharded; the first one counts them. None: all of `model_parallel_group`.
        training_group: all ranks that take each step together. They skip together, clip by one norm, have one
            scale, and exchange where gradients overflowed. None: all ranks of the job.
        is_flag_shared: the gradients are averaged and reduced such that all ranks of `training_group` compute
            the same flag and norm anyway; saves an all-reduce of 16 bytes.
        gradient_norm: the norm to report and clip by: that of all gradients together ("global"), or the sum
            of the parameters' norms ("sum_of_norms", as in Metis).
        before_step: called at the start of a step with the loss scale, by which all gradients are then
            multiplied; may add to them.
        named_parameters: names for reports, as from `model.named_parameters()`; may include other parameters.
        instruments: hooks of scale strategies and layer scaling; those that need no model are made here.
        timers: measure the phases "inspect" and "update".

    Raises:
        UserError: a value is invalid for any step.
    """

    clip_grad: float
    log_num_zeros_in_grad: bool = False
    params_have_main_grad: bool = True
    model_parallel_group: dist.ProcessGroup | None = None
    tensor_parallel_group: dist.ProcessGroup | None = None
    training_group: dist.ProcessGroup | None = None
    is_flag_shared: bool = False
    gradient_norm: GradientNorm = "global"
    before_step: BeforeStep | None = None
    named_parameters: NamedParameters | None = None
    instruments: Instruments | None = None
    timers: StepTimers | None = None

    def __post_init__(self) -> None:
        if self.gradient_norm not in get_args(GradientNorm):
            raise unknown_name("gradient_norm", self.gradient_norm, get_args(GradientNorm))
        if not 0 <= self.clip_grad < float("inf"):
            raise UserError(
                f"clip_grad must be a finite number ≥ 0 (0 turns clipping off), not {self.clip_grad!r}"
            )
        scaling = self.instruments.layer_scaling if self.instruments is not None else None
        if scaling is not None and not self.params_have_main_grad:
            raise UserError(
                "layer scaling divides its factors out of main_grad: use params_have_main_grad=True"
            )


# the same for all optimizers that step as one
SHARED = ("clip_grad", "gradient_norm", "log_num_zeros_in_grad", "training_group")


def options_in(settings: object) -> dict[str, Any]:
    """The options of `StepOptions` that a configuration has, under the same names."""
    names = (field.name for field in fields(StepOptions))
    return {name: getattr(settings, name) for name in names if hasattr(settings, name)}
