"""Which arguments of `initialize` go together."""

from __future__ import annotations

import torch

from megalowbit.config.deepspeed_json import EngineSettings
from megalowbit.engine.model_optimizer import HALF, ClientOptimizer, ModelParameters
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import refuse_partitioned


def check_arguments(
    model: torch.nn.Module,
    settings: EngineSettings,
    optimizer: ClientOptimizer | None,
    model_parameters: ModelParameters | None,
    lr_scheduler: object,
) -> None:
    """Refuse arguments of `initialize` that contradict each other or the configured precision.

    Raises:
        UserError: names the argument or the parameter.
    """
    is_built = isinstance(optimizer, torch.optim.Optimizer)
    if optimizer is not None and not is_built and not callable(optimizer):
        raise UserError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch optimizer, or a callable that makes one"
        )
    if is_built and model_parameters is not None:
        raise UserError("pass optimizer or model_parameters, not both: an optimizer has its parameters")
    is_bound = isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if is_bound and getattr(lr_scheduler, "optimizer", None) is not optimizer:
        raise UserError(
            "lr_scheduler belongs to another optimizer: pass a callable from optimizer to scheduler instead"
        )
    refuse_partitioned(model)
    allowed = {torch.float32, HALF.get(settings.precision, torch.float32)}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            raise UserError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')} but precision is "
                f"{settings.precision}: call model.float() first"
            )
