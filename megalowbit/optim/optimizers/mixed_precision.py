"""The two mixed-precision optimizers: with fp32 masters of a half-precision model, and for an fp32 model.

`Float16OptimizerWithFloat16Params` has the name, groups and state keys of Megatron's class. `FP32Optimizer`
behaves like Megatron's, for models that need no masters. Unlike the originals, both skip non-finite gradients
even without a scaler, and loading a state restores the model from the masters.
`chained` combines several optimizers under one scaler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.precision.fp32_modules import is_kept_fp32

HALF_DTYPES = (torch.float16, torch.bfloat16)
COPIED_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "allreduce")


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """An optimizer for an fp16 or bf16 model, with updates in fp32.

    The inner optimizer's parameters are replaced by fp32 masters. Groups: `float16_groups` (model),
    `fp32_from_float16_groups` (their masters), `fp32_from_fp32_groups` (model parameters that are fp32).
    After a backward, `.grad` of a half-precision parameter is its fp32 sum: `model.zero_grad()` clears it,
    and a `.grad` that was assigned is applied. Source: Megatron-LM's class of the same name.

    Args:
        optimizer: torch optimizer over the model's parameters. With `fused=True` its updates are fastest and
            need no host read of the overflow flag before them.
        grad_scaler: required with fp16; usually None with bf16.
        bf16: the model is bfloat16, not float16.
        cast_parameters: cast fp32 parameters to half precision; the masters keep their exact values. False
            leaves them fp32, in `fp32_from_fp32_groups`, like those marked by `fp32_modules.keep_fp32`.
        options: `clip_grad`, which is required, and others, see `StepOptions`.

    Raises:
        UserError: fp16 without a scaler, or options that cannot be combined.
        TypeError: a parameter is not fp16, bf16 or fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        grad_scaler: GradScaler | None,
        bf16: bool = False,
        cast_parameters: bool = False,
        **options: Any,
    ) -> None:
        if grad_scaler is None and not bf16:
            raise UserError("fp16 expects a grad scaler. Pass grad_scaler=DynamicGradScaler(), or bf16=True")
        self.half_dtype = torch.bfloat16 if bf16 else torch.float16
        self.cast_parameters = cast_parameters
        super().__init__(optimizer, grad_scaler=grad_scaler, **options)

    def _replace_group_params(self, group: dict[str, Any]) -> None:
        number = len(self.float16_groups)
        _check_dtypes(group["params"], (*HALF_DTYPES, torch.float32), number)
        self.left_out.drop_from(group, number)
        halves, masters, fp32, inner = [], [], [], []
        for parameter in group["params"]:
            is_kept = is_kept_fp32(parameter) or not self.cast_parameters
            if parameter.dtype == torch.float32 and is_kept:
                fp32.append(parameter)
                inner.append(parameter)
                continue
            master = _master_of(parameter)
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(self.half_dtype)
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = _widened(self.optimizer.state.pop(parameter), master)
            halves.append(parameter)
            masters.append(master)
            inner.append(master)
        group["params"] = inner
        self.float16_groups.append(halves)
        self.fp32_from_float16_groups.append(masters)
        self.fp32_from_fp32_groups.append(fp32)


class FP32Optimizer(MegatronOptimizer):
    """The same report, clipping and skipping for a model that is entirely fp32, without a loss scale.

    `.grad` means the same as in torch, except that None is a gradient of zero unless the parameter is frozen.

    Args:
        optimizer: torch optimizer over the model's parameters.
        options: `clip_grad`, which is required, and others, see `StepOptions`.

    Raises:
        UserError: options that cannot be combined.
        TypeError: a parameter is not fp32.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(optimizer, grad_scaler=None, **options)

    def _replace_group_params(self, group: dict[str, Any]) -> None:
        number = len(self.fp32_from_fp32_groups)
        _check_dtypes(group["params"], (torch.float32,), number)
        self.left_out.drop_from(group, number)
        self.float16_groups.append([])
        self.fp32_from_float16_groups.append([])
        self.fp32_from_fp32_groups.append(list(group["params"]))


def _check_dtypes(parameters: Sequence[torch.Tensor], allowed: tuple[torch.dtype, ...], group: int) -> None:
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad and parameter.dtype not in allowed:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(
                f"parameter {index} of group {group}, shape {tuple(parameter.shape)}, is "
                f"{str(parameter.dtype).removeprefix('torch.')}: convert it to one of {names}"
            )


def _widened(state: Mapping[str, Any], master: torch.Tensor) -> dict[str, Any]:
    """A parameter's state with its moments in fp32: Adagrad makes them with the half-precision parameter."""

    def is_moment(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == master.shape

    return {key: value.float() if is_moment(value) else value for key, value in state.items()}


def _master_of(parameter: torch.Tensor) -> torch.Tensor:
    """An fp32 copy of `parameter`, made before the parameter is cast."""
    master = parameter.detach().clone().float().requires_grad_(True)
    for name in COPIED_ATTRIBUTES:
        if hasattr(parameter, name):
            setattr(master, name, getattr(parameter, name))
    return master
