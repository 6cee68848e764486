"""Checks the model and arguments of `initialize`, and the engine that it builds.

Arguments must not contradict each other or the configured precision. DeepSpeed must not have replaced any
low-bit layer, nor our loss scaler.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.engine.model_optimizer import HALF, ClientOptimizer, ModelParameters
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.refusals import refuse_partitioned
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.values import BLOCK


def check_arguments(
    model: torch.nn.Module,
    settings: EngineSettings,
    optimizer: ClientOptimizer | None,
    model_parameters: ModelParameters | None,
    lr_scheduler: object,
) -> None:
    """Reject arguments of `initialize` that contradict each other or the configured precision."""
    is_built = isinstance(optimizer, torch.optim.Optimizer)
    if optimizer is not None and not is_built and not callable(optimizer):
        raise UserError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch optimizer, or a callable that makes one"
        )
    if is_built and model_parameters is not None:
        raise UserError(
            "pass optimizer or model_parameters, not both: an optimizer already has its parameters"
        )
    is_bound = isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if is_bound and getattr(lr_scheduler, "optimizer", None) is not optimizer:
        raise UserError(
            "lr_scheduler belongs to another optimizer: pass a callable from optimizer to scheduler instead"
        )
    if lr_scheduler is not None and settings.lr_schedule is not None:
        raise UserError(
            "lr_scheduler and megalowbit.lr_schedule both set the learning rate: leave one of them out"
        )
    refuse_partitioned(model)
    allowed = {torch.float32, HALF.get(settings.precision, torch.float32)}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            raise UserError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')} but precision is "
                f"{settings.precision}: call model.float() first"
            )


def check_layers_kept(module: torch.nn.Module, converted: Collection[str]) -> None:
    """Check that DeepSpeed has not replaced the low-bit layers named in `converted`."""
    present = bit_layers(module)
    missing = [name for name in converted if name not in present]
    if missing:
        modules = dict(module.named_modules())
        now = type(modules[missing[0]]).__name__ if missing[0] in modules else "gone"
        raise UserError(
            f"DeepSpeed replaced {len(missing)} of {len(converted)} low-bit layers ({missing[0]} is {now}): "
            "turn off the options that replace layers in the configuration"
        )


def check_scaler(engine: Any) -> None:
    """Check that the engine uses our loss scaler; call it before the first step and after a load."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "grad_scaler", None)
    of_deepspeed = getattr(optimizer, "loss_scaler", None)
    is_ours = scaler is None or isinstance(scaler, GradScaler)
    is_adapter = of_deepspeed is None or type(of_deepspeed).__module__.startswith(f"{BLOCK}.")
    if not (hasattr(optimizer, "grad_scaler") and is_ours and is_adapter):
        found = of_deepspeed if is_ours and of_deepspeed is not None else scaler
        kind = f"{type(found).__module__}.{type(found).__name__}"
        raise UserError(
            f"the engine's loss scaler is a {kind}, not the one configured in "
            "megalowbit.grad_scaler: do not replace it, and resume only from checkpoints of megalowbit"
        )
