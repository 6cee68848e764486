"""Checks of the optimizer that steps a converted model in another library's loop.

An optimizer that was built too early trains weights that the model no longer has, or masters on another
device, and nothing fails. One of megalowbit's optimizers may also expect what the loop does not do.
Optimizers are recognised by their attributes, because layers do not import optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalowbit.distributed.sharded_parameters import is_sharded
from megalowbit.values import counted


def innermost(wrapper: Any) -> Any:
    """The optimizer in wrappers of Accelerate and DeepSpeed: one of megalowbit's, or torch's."""
    while hasattr(wrapper, "optimizer") and not hasattr(wrapper, "params_have_main_grad"):
        wrapper = wrapper.optimizer
    return wrapper


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def optimizer_problems(model: nn.Module, optimizers: list[object], engine: Any | None) -> list[str]:
    """What is wrong with the optimizer that steps a converted model; empty if nothing is.

    Args:
        model: the converted model itself, not a wrapper.
        optimizers: the loop's and the engine's, also in wrappers; None is allowed.
        engine: stock DeepSpeed's around the model, if there is one. Its optimizer holds flat copies.
    """
    for optimizer in map(innermost, filter(None, optimizers)):
        parts = parts_of(optimizer)
        if engine is None:
            own = [each for part in parts for each in _weights_of(part)]
            found = [
                *_lightning_problems(model, parts),
                *_foreign_weights(model, optimizer, own),
                *(p for part in parts for p in _moved_weights(part)),
            ]
            if found:
                return found[:1]
        for part in parts:
            if hasattr(part, "params_have_main_grad") and (problem := _gradient_problem(part, engine)):
                return [problem]
    return []


def _lightning_problems(model: Any, parts: list[Any]) -> list[str]:
    """Lightning clips `.grad` of what is in the optimizer's groups: the fp32 masters, which have none."""
    try:
        limit = model.trainer.gradient_clip_val
    except (AttributeError, RuntimeError):  # not a LightningModule, or one that no Trainer fits
        return []
    if not limit or not any(map(any, (getattr(part, "fp32_from_float16_groups", ()) for part in parts))):
        return []
    return [
        f"gradient_clip_val = {limit} of Lightning would clip nothing, because the optimizer's groups hold "
        "fp32 masters: leave it out, and set clip_grad in OptimizerConfig"
    ]


def _weights_of(optimizer: Any) -> list[Tensor]:
    """The model's weights that an optimizer trains; of megalowbit's, not their masters."""
    if not hasattr(optimizer, "params_have_main_grad"):
        return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    groups = (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups)
    return [each for group in groups for each in group]


def _foreign_weights(model: nn.Module, optimizer: Any, held: list[Tensor]) -> list[str]:
    """Weights of a model as it was before `convert` replaced them, which nobody uses any more."""
    own = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    foreign = [each for each in held if id(each) not in own and each.requires_grad]
    ids = set(map(id, held))
    missing = [name for key, name in own.items() if key not in ids]
    if not foreign or not missing:
        return []
    is_of_fsdp = is_sharded(model.get_parameter(missing[0]))
    later = "fully_shard, and after model.reshard() if the model ran" if is_of_fsdp else "megalowbit.convert"
    return [
        f"{type(optimizer).__name__} holds {counted(len(foreign), 'weight')} that the model no longer has, "
        f"and not {missing[0]}: build the optimizer after {later}"
    ]


def _moved_weights(optimizer: Any) -> list[str]:
    """Weights that were cast or moved since one of megalowbit's optimizers was built for them."""
    if not hasattr(optimizer, "params_have_main_grad"):
        return []
    for group in optimizer.fp32_from_fp32_groups:
        for weight in group:
            if weight.dtype != torch.float32:
                return [
                    f"weights were cast to {name_of_dtype(weight.dtype)} after the optimizer was built for "
                    "float32: cast the model before"
                ]
    for weights, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            if weight.device != master.device:
                return [
                    f"weights are on {weight.device} and their fp32 masters on {master.device}: move the "
                    "model before the optimizer is built"
                ]
            if weight.dtype == torch.float32:
                return [
                    "weights with fp32 masters were cast to float32: cast the model before the optimizer "
                    "is built"
                ]
    return []


def _gradient_problem(optimizer: Any, engine: Any | None) -> str | None:
    """What one of megalowbit's optimizers expects of the gradients, and this loop does not do."""
    kind = type(optimizer).__name__
    if optimizer.grad_scaler is not None:
        return (
            f"{kind} divides gradients by a loss scale of {optimizer.loss_scale:g}, and this loop does "
            "not multiply the loss by it: use bf16 without a scaler, megalowbit.initialize, or a loop "
            "that calls optimizer.scale_loss(loss)"
        )
    if engine is not None:
        return (
            f"{kind} is stepped by an engine of stock DeepSpeed, which keeps its gradients elsewhere: "
            "make the engine with megalowbit.initialize(optimizer=…)"
        )
    if optimizer.params_have_main_grad and _is_one_of_many():  # alone, .grad is the sum in main_grad
        return (
            f"{kind} takes gradients from main_grad, and this loop averages .grad: build it with "
            "params_have_main_grad=False, or use megalowbit.initialize"
        )
    return None


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def name_of_dtype(dtype: torch.dtype) -> str:
    """`float16`, without `torch.`."""
    return str(dtype).removeprefix("torch.")
