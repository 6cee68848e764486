"""Models and layers that cannot be converted, or converted back, as they are; and what would be wrong then.

All of this would go wrong in silence: a replaced layer that is still called, a weight that is computed anew
from another one, parameters that an optimizer no longer trains.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping

import torch
from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.values import counted

logger = logging.getLogger(__name__)
INVERSE_FREQUENCIES = "inv_freq"  # the name that transformers gives to those of rotary positions


def refuse_partitioned(model: nn.Module) -> None:
    """Reject a model that was built under `deepspeed.zero.Init`, whose parameters look empty.

    Raises:
        UserError: names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):  # DeepSpeed's mark
            raise UserError(
                f"parameter {name} is already partitioned, by deepspeed.zero.Init or an earlier engine at "
                "stage 3, so its exact values are lost: build the model outside of zero.Init, because "
                "mlb.initialize partitions it (transformers enters zero.Init while a "
                "TrainingArguments(deepspeed=…) or HfDeepSpeedConfig with stage 3 exists: build the model "
                "before)"
            )


def refuse_adapters(model: nn.Module, function: str, remedy: str) -> None:
    """Reject a model with adapters of PEFT, which would be rounded, and merged in the former orientation.

    PEFT notes at each adapter whether it belongs to a Conv1D. With that of a square weight, the transposed
    product would be added without an error.

    Raises:
        UserError: names the first such layer.
    """
    adapter = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if adapter is None:
        return
    found = [name for name, module in model.named_modules() if isinstance(module, adapter)]
    if found:
        raise UserError(f"PEFT has added an adapter to layer {found[0]}, so {function} is refused: {remedy}")


def refuse_bound_layers(layers: Mapping[str, nn.Module], function: str) -> None:
    """Reject layers whose forward or weight is bound to the module that would be replaced.

    Args:
        layers: that would be replaced, by name.
        function: `convert` or `restore`.

    Raises:
        UserError: a layer has a forward of its own (a hook of Accelerate), was compiled before `convert`, or
            computes its weight from other parameters.
    """
    for name, layer in layers.items():
        if has_own_forward(layer):
            raise UserError(
                f"layer {name} has a forward of its own, which would call the former layer again (hooks of "
                'Accelerate are such, after from_pretrained(device_map="auto") or dispatch_model): call '
                f"accelerate.hooks.remove_hook_from_module(model, recurse=True), then {function}, then "
                "dispatch_model again"
            )
        if function == "convert" and layer._compiled_call_impl is not None:
            raise UserError(
                f"layer {name} is compiled, and its replacement would not be: compile it after convert"
            )
        has_plain_weight = layer._parameters.get("weight") is not None or getattr(layer, "is_split", False)
        is_transposed = getattr(layer, "is_transposed", not isinstance(layer, nn.Linear))
        if "parametrizations" in layer._modules or (is_transposed and not has_plain_weight):
            raise UserError(
                f"layer {name} computes its weight from other parameters, which {function} would not turn: "
                "call torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or prune.remove "
                "first"
            )


def has_own_forward(layer: nn.Module) -> bool:
    """Whether an attribute hides the forward of the class; a removed hook leaves that of the class itself."""
    own = layer.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(layer).forward


def warn_of_new_parameters(layers: Collection[BitLinear]) -> None:
    """Say that `restore` has given layers new parameters, which no earlier optimizer or engine trains."""
    if layers:
        logger.warning(
            "restore has given %s new parameters, which an optimizer or engine that was built earlier does "
            "not train: build it again, or use megalowbit.switch_precision(model, 'all') to train on in high "
            "precision instead",
            counted(len(layers), "layer"),
        )


def warn_of_rounded_positions(model: nn.Module) -> None:
    """Say that rotary positions are rounded to half precision, as `model.bfloat16()` does.

    Checkpoints have no frequencies: a model that is loaded computes them in fp32, so other angles than those
    it was trained with, the more so the larger the distance.
    """
    for name, buffer in model.named_buffers():
        if INVERSE_FREQUENCIES in name and buffer.dtype in (torch.bfloat16, torch.float16):
            logger.warning(
                "buffer %s is in %s, so positions are rounded, and a model loaded from this one's checkpoint "
                "has others: build or load the model with dtype=%s, which keeps it in fp32, not with a cast",
                name,
                buffer.dtype,
                buffer.dtype,
            )
            return
