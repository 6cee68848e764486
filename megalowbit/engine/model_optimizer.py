"""The optimizer of a model inside DeepSpeed's engine: which parameters it trains, and ours around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.engine.config import DeepSpeedConfigParts
from megalowbit.errors import UserError
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.optim.fp32_modules import is_kept_fp32
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.param_groups import weight_decay_groups
from megalowbit.optim.scaler_settings import build_grad_scaler
from megalowbit.optim.step_options import StepOptions

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
ModelParameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def parameter_groups(
    model: torch.nn.Module, model_parameters: ModelParameters | None, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Groups to train; those given must be the model's, which layer conversion may have replaced."""
    if model_parameters is None:
        decay = config["optimizer"]["params"].get("weight_decay", 0.0)
        return weight_decay_groups(model, decay)
    given: list[Any] = list(model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    known = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(parameter) not in known for group in groups for parameter in group["params"])
    if strangers or not any(group["params"] for group in groups):
        raise UserError(
            f"model_parameters holds {strangers} parameters that are not (or no longer) the model's: "
            "convert the model first, then collect its parameters"
        )
    return groups


def wrap_optimizer(
    inner: torch.optim.Optimizer,
    model: torch.nn.Module,
    parts: DeepSpeedConfigParts,
    *,
    mpu: Any,
    regularizer: DualRangeRegularizer | None,
) -> torch.optim.Optimizer:
    """Our optimizer around `inner`; the model has its final dtype afterwards.

    Raises:
        UserError: scaler or layer scaling ask for what the model has not.
    """
    from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer, DeepSpeedFP32Optimizer

    settings = parts.settings
    grad_scaler = build_grad_scaler(settings.grad_scaler, settings.precision)
    options: StepOptions = {
        "clip_grad": parts.deepspeed["gradient_clipping"],
        "log_num_zeros_in_grad": settings.log_num_zeros_in_grad,
        "gradient_norm": settings.gradient_norm,
        "before_step": regularizer.add_gradients if regularizer is not None else None,
        "model_parallel_group": mpu.get_model_parallel_group() if mpu is not None else None,
        "tensor_parallel_group": _tensor_parallel_group(mpu),
        "training_group": dist.group.WORLD,
        "is_flag_shared": True,  # the engine averages over data parallel, we reduce over model parallel
        "named_parameters": list(model.named_parameters()),
        "instruments": Instruments.attach(model, grad_scaler, layer_scaling=settings.layer_scaling),
    }
    if settings.precision == "fp32":
        return DeepSpeedFP32Optimizer(inner, **options)
    wrapped = DeepSpeedFloat16Optimizer(
        inner, **options, grad_scaler=grad_scaler, bf16=settings.precision == "bf16", cast_parameters=True
    )
    # frozen parameters have no master, but meet the others in the same products
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and not is_kept_fp32(parameter):
            parameter.data = parameter.data.to(HALF[settings.precision])
    return wrapped


def copies_group(mpu: Any) -> dist.ProcessGroup | None:
    """Ranks that hold copies of what is not sharded: tensor-parallel ones, or all model-parallel ones."""
    if mpu is None:
        return None
    return _tensor_parallel_group(mpu) or mpu.get_model_parallel_group()


def _tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """Of Megatron's parallel state, which has one within the model-parallel group; DeepSpeed needs none."""
    group_of = getattr(mpu, "get_tensor_model_parallel_group", None)
    return group_of() if group_of is not None else None
