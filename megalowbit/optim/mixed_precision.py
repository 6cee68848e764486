"""The two optimizers users meet: fp32 masters of a half-precision model, or an fp32 model as it is.

`Float16OptimizerWithFloat16Params` keeps Megatron's name, groups and state keys, `FP32Optimizer` its
behaviour where there is nothing to keep in fp32. Unlike the originals both skip non-finite gradients even
without a scaler, and loading a state restores the model from the masters. Not covered: closures, and one
scaler shared by several optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megalowbit.errors import UserError
from megalowbit.optim.grad_norm import GradientNorm
from megalowbit.optim.grad_scaler import GradScaler
from megalowbit.optim.optimizer_step import BeforeStep, MixedPrecisionOptimizer

HALF_DTYPES = (torch.float16, torch.bfloat16)
COPIED_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared")


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """An optimizer whose model is fp16 or bf16 and whose updates happen in fp32.

    The inner optimizer's parameters are replaced by fp32 masters. Groups: `float16_groups` (model),
    `fp32_from_float16_groups` (their masters), `fp32_from_fp32_groups` (model parameters that are fp32).
    Source: Megatron-LM's class of the same name.

    Args:
        optimizer: torch optimizer over the model's parameters; with `fused=True` a step reads gradients once.
        clip_grad: largest gradient norm; 0 turns clipping off.
        grad_scaler: required with fp16; with bf16 None is usual.
        log_num_zeros_in_grad: count exact zeros at each step.
        params_have_main_grad: gradients add up in fp32 `main_grad`s; if the parameters have none, a
            `GradBuffer` is made. False reads `.grad` at `step`; a parameter without one is not updated.
        bf16: the model is bfloat16, not float16.
        cast_parameters: cast fp32 parameters to half precision; the masters keep their exact value. False
            leaves them fp32, in `fp32_from_fp32_groups`.
        model_parallel_group: over which norm, zeros and overflow are reduced.
        gradient_norm: what is reported and clipped: the norm of all gradients together ("global"), or the sum
            of the parameters' norms ("sum_of_norms", as Metis clips).
        before_step: called at the start of a step with the loss scale, by which all gradients are multiplied
            then; may add to them.

    Raises:
        UserError: fp16 without a scaler.
        TypeError: a parameter is not fp16, bf16 or fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float,
        grad_scaler: GradScaler | None,
        log_num_zeros_in_grad: bool = False,
        params_have_main_grad: bool = True,
        bf16: bool = False,
        cast_parameters: bool = False,
        model_parallel_group: dist.ProcessGroup | None = None,
        gradient_norm: GradientNorm = "global",
        before_step: BeforeStep | None = None,
    ) -> None:
        if grad_scaler is None and not bf16:
            raise UserError("fp16 expects a grad scaler. Pass grad_scaler=DynamicGradScaler(), or bf16=True")
        self.half_dtype = torch.bfloat16 if bf16 else torch.float16
        self.cast_parameters = cast_parameters
        super().__init__(
            optimizer,
            clip_grad=clip_grad,
            log_num_zeros_in_grad=log_num_zeros_in_grad,
            params_have_main_grad=params_have_main_grad,
            grad_scaler=grad_scaler,
            model_parallel_group=model_parallel_group,
            gradient_norm=gradient_norm,
            before_step=before_step,
        )

    def _adopt_group(self, group: dict[str, Any]) -> None:
        halves, masters, fp32, inner = [], [], [], []
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            _check_dtype(parameter, (*HALF_DTYPES, torch.float32), index, len(self.float16_groups))
            if parameter.dtype == torch.float32 and not self.cast_parameters:
                fp32.append(parameter)
                inner.append(parameter)
                continue
            master = _master_of(parameter)
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(self.half_dtype)
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
            halves.append(parameter)
            masters.append(master)
            inner.append(master)
        group["params"] = inner
        self.float16_groups.append(halves)
        self.fp32_from_float16_groups.append(masters)
        self.fp32_from_fp32_groups.append(fp32)


class FP32Optimizer(MixedPrecisionOptimizer):
    """The same facts, clipping and skipping for a model that is fp32 throughout; there is no loss scale.

    Args:
        optimizer: torch optimizer over the model's parameters.
        clip_grad: largest gradient norm; 0 turns clipping off.
        log_num_zeros_in_grad: count exact zeros at each step.
        params_have_main_grad: as for `Float16OptimizerWithFloat16Params`.
        model_parallel_group: over which norm, zeros and overflow are reduced.
        gradient_norm: what is reported and clipped: the norm of all gradients together ("global"), or the sum
            of the parameters' norms ("sum_of_norms", as Metis clips).
        before_step: called at the start of a step with the loss scale, by which all gradients are multiplied
            then; may add to them.

    Raises:
        TypeError: a parameter is not fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float,
        log_num_zeros_in_grad: bool = False,
        params_have_main_grad: bool = True,
        model_parallel_group: dist.ProcessGroup | None = None,
        gradient_norm: GradientNorm = "global",
        before_step: BeforeStep | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            clip_grad=clip_grad,
            log_num_zeros_in_grad=log_num_zeros_in_grad,
            params_have_main_grad=params_have_main_grad,
            grad_scaler=None,
            model_parallel_group=model_parallel_group,
            gradient_norm=gradient_norm,
            before_step=before_step,
        )

    def _adopt_group(self, group: dict[str, Any]) -> None:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        for index, parameter in enumerate(group["params"]):
            _check_dtype(parameter, (torch.float32,), index, len(self.fp32_from_fp32_groups))
        self.float16_groups.append([])
        self.fp32_from_float16_groups.append([])
        self.fp32_from_fp32_groups.append(list(group["params"]))


def _check_dtype(parameter: torch.Tensor, allowed: tuple[torch.dtype, ...], index: int, group: int) -> None:
    if parameter.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(
            f"parameter {index} of group {group}, shape {tuple(parameter.shape)}, is "
            f"{str(parameter.dtype).removeprefix('torch.')}: convert it to one of {names}"
        )


def _master_of(parameter: torch.Tensor) -> torch.Tensor:
    """An fp32 copy of `parameter`, taken before any cast of it."""
    master = parameter.detach().clone().float().requires_grad_(True)
    for name in COPIED_ATTRIBUTES:
        if hasattr(parameter, name):
            setattr(master, name, getattr(parameter, name))
    return master
