"""Selects the parameters to train and wraps their optimizer in ours, for DeepSpeed's engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.errors import UserError
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.registry import build_grad_scaler
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.options import options_in
from megalowbit.optim.optimizers.param_groups import refuse_repeated, weight_decay_groups
from megalowbit.optim.precision.fp32_modules import is_kept_fp32

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
ModelParameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
# the user's optimizer, or a callable that creates one from parameters or groups, as in `deepspeed.initialize`
ClientOptimizer = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]


def groups_to_train(
    model: torch.nn.Module,
    optimizer: ClientOptimizer | None,
    model_parameters: ModelParameters | None,
    config: dict[str, Any],
) -> list[dict[str, Any]]:
    """Groups of parameters to train. The model must already be sharded and converted.

    Raises:
        UserError: a parameter does not belong to the model or occurs twice, or none is trainable.
    """
    _check_trained(model, model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        _check_client(model, optimizer)
    elif optimizer is not None and model_parameters is None:
        groups = [{"params": [each for each in model.parameters() if each.requires_grad]}]
    else:
        groups = parameter_groups(model, model_parameters, config)
    _check_trained(model, (parameter for group in groups for parameter in group["params"]))
    refuse_repeated(groups)
    return groups


def client_optimizer(
    model: torch.nn.Module, make: ClientOptimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The user's optimizer; created now if `make` is a callable."""
    if isinstance(make, torch.optim.Optimizer):
        return make
    optimizer = make(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer returned a {type(optimizer).__name__}: return a torch.optim.Optimizer")
    _check_client(model, optimizer)
    refuse_repeated(optimizer.param_groups)
    return optimizer


def _check_trained(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> None:
    if not any(parameter.requires_grad for parameter in parameters):
        stage = getattr(model, "stage_id", None)  # a pipeline stage must have gradients to send
        raise UserError(
            f"{'the model' if stage is None else f'stage {stage}'} has no trainable parameter: "
            "set requires_grad on at least one"
            + ("" if stage is None else ", or choose another pipeline.partition")
        )


def _check_client(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    foreign = _count_foreign_parameters(model, optimizer.param_groups)
    if foreign:
        raise UserError(
            f"optimizer holds {foreign} parameters that are not (or no longer) the model's, because layers "
            "were sharded or converted: pass a callable from parameters to optimizer, such as "
            "lambda groups: AdamW(groups, lr=1e-4)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optimizer {type(optimizer).__name__} needs a closure to step, which the engine does not have: "
            "use one that steps on gradients, such as AdamW"
        )
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                raise UserError(
                    f"optimizer has {name} of shape {tuple(value.shape)} for a parameter that has shape "
                    f"{tuple(parameter.shape)} after sharding: pass an optimizer without state"
                )


def _count_foreign_parameters(model: torch.nn.Module, groups: Iterable[dict[str, Any]]) -> int:
    known = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) not in known for group in groups for parameter in group["params"])


def parameter_groups(
    model: torch.nn.Module, model_parameters: ModelParameters | None, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Groups to train. Given parameters must be the model's; layer conversion may have replaced them."""
    if model_parameters is None:
        decay = config["optimizer"]["params"].get("weight_decay", 0.0)
        return weight_decay_groups(model, decay)
    given: list[Any] = list(model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    foreign = _count_foreign_parameters(model, groups)
    if foreign or not any(group["params"] for group in groups):
        raise UserError(
            f"model_parameters holds {foreign} parameters that are not (or no longer) the model's: "
            "convert the model first, then collect its parameters"
            + (
                ", or leave model_parameters out, because tensor parallelism shards the model"
                if hasattr(model, "ds_autotp_parsed")
                else ""
            )
        )
    return groups


def wrap_optimizer(
    inner: torch.optim.Optimizer,
    model: torch.nn.Module,
    parts: DeepSpeedConfigParts,
    *,
    mpu: Any,
    regularizer: DualRangeRegularizer | None,
) -> MegatronOptimizer:
    """Wrap `inner` in our optimizer and cast the model to its final dtype."""
    from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer, DeepSpeedFP32Optimizer

    settings = parts.settings
    grad_scaler = build_grad_scaler(settings.grad_scaler, settings.precision)
    options = {
        **step_options(parts),
        "before_step": regularizer.add_gradients if regularizer is not None else None,
        "model_parallel_group": mpu.get_model_parallel_group() if mpu is not None else None,
        "tensor_parallel_group": _tensor_parallel_group(mpu),
        "training_group": dist.group.WORLD,
        # the engine averages over data-parallel ranks, we reduce over model-parallel ranks
        "is_flag_shared": True,
        "named_parameters": list(model.named_parameters()),
        "instruments": Instruments.attach(model, grad_scaler, layer_scaling=settings.layer_scaling),
    }
    if settings.precision == "fp32":
        return DeepSpeedFP32Optimizer(inner, **options)
    wrapped = DeepSpeedFloat16Optimizer(
        inner, **options, grad_scaler=grad_scaler, bf16=settings.precision == "bf16", cast_parameters=True
    )
    # frozen parameters have no master, but are multiplied with the others, so they need the same dtype
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and not is_kept_fp32(parameter):
            parameter.data = parameter.data.to(HALF[settings.precision])
    return wrapped


def step_options(parts: DeepSpeedConfigParts) -> dict[str, Any]:
    """Options of every step, at all ZeRO stages; see `StepOptions`."""
    return {"clip_grad": parts.deepspeed["gradient_clipping"], **options_in(parts.settings)}


def copies_group(mpu: Any) -> dist.ProcessGroup | None:
    """Ranks with copies of unsharded parameters: the tensor-parallel ranks, or all model-parallel ranks."""
    if mpu is None:
        return None
    return _tensor_parallel_group(mpu) or mpu.get_model_parallel_group()


def _tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The mpu's tensor-parallel group, if it has one; DeepSpeed does not require it."""
    group_of = getattr(mpu, "get_tensor_model_parallel_group", None)
    return group_of() if group_of is not None else None
