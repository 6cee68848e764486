"""Translates DeepSpeed's `fp16` and `bf16` blocks into `precision` and `grad_scaler`.

A configuration written for plain DeepSpeed should run unchanged. DeepSpeed must not see these blocks, because
it would wrap our optimizer in another one, so they are removed after translation. A key without a counterpart
is an error that names it. Keys left out have DeepSpeed's defaults (an initial scale of 2**16, not 2**32). A
block that is explicitly off, with none on, means fp32 unless the `"megalowbit"` block has a precision.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megalowbit.config.values import check_value, unknown_key
from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number

logger = logging.getLogger(__name__)

BLOCKS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
SCALER_DEFAULTS = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "consecutive_hysteresis": False,
}
SCALER_KEYS = tuple(SCALER_DEFAULTS)
# keys that must have this value, and why
FIXED = {
    "auto_cast": (False, "inputs keep their type; megalowbit.autocast casts by operation"),
    "fp16_master_weights_and_grads": (False, "masters are fp32"),
    "bf16_master_weights_and_grads": (False, "masters are fp32"),
    "bf16_optimizer_states": (False, "optimizer states are fp32"),
}
# keys whose value has no effect, and why
IGNORED = {
    "immediate_grad_update": "gradients are always added to fp32 as soon as they exist",
    "check_grad_overflow": "non-finite gradients are always skipped",
}
KEYS = {
    "fp16": ("enabled", *SCALER_KEYS, "auto_cast", "fp16_master_weights_and_grads"),
    "bf16": ("enabled", *IGNORED, "bf16_master_weights_and_grads", "bf16_optimizer_states"),
}


def take_stock_precision(config: dict[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the stock blocks from `config`, in place, and return what they add to the `"megalowbit"` block.

    Args:
        config: DeepSpeed's keys.
        block: the `"megalowbit"` block, which must not contradict the stock blocks.

    Returns:
        `precision` and, for fp16, `grad_scaler`; empty if no stock block sets them.

    Raises:
        UserError: two blocks are enabled, a key is unknown or has no counterpart, or `block` contradicts
            them.
    """
    if "bf16" in config and "bfloat16" in config:
        raise UserError("bf16 and bfloat16 are two names of one block: remove bfloat16")
    enabled: dict[str, Mapping[str, Any]] = {}
    is_switched_off = False
    for name, precision in BLOCKS.items():
        if name not in config:
            continue
        stock = config.pop(name)
        _check_block(name, stock, KEYS[precision])
        if _is_enabled(name, stock, precision, block.get("precision")):
            enabled[name] = stock
        elif stock.get("enabled") is False:
            is_switched_off = True
            if block.get("precision") == precision:
                raise UserError(
                    f"{name}.enabled = false contradicts megalowbit.precision = {shown(precision)}: "
                    "remove one of them"
                )
    if not enabled:
        return {"precision": "fp32"} if is_switched_off and "precision" not in block else {}
    if len(enabled) > 1:
        raise UserError(
            f"{' and '.join(f'{name}.enabled' for name in enabled)} are both true: enable one of them"
        )
    (name, stock), *_ = enabled.items()
    precision = BLOCKS[name]
    if block.get("precision", precision) != precision:
        raise UserError(
            f"{name}.enabled = true contradicts megalowbit.precision = {shown(block['precision'])}: "
            "remove one of them"
        )
    _check_counterparts(name, stock)
    if precision == "bf16":
        return {"precision": precision}
    scaler = _scaler(stock)
    given = [key for key in SCALER_KEYS if key in stock]
    if given and block.get("grad_scaler") not in (None, scaler):
        raise UserError(
            f"fp16.{given[0]} = {shown(stock[given[0]])} contradicts megalowbit.grad_scaler = "
            f"{block['grad_scaler']!r}: remove one of them"
        )
    if not given and block.get("grad_scaler") is not None:
        return {"precision": precision}
    return {"precision": precision, "grad_scaler": scaler}


def _check_block(name: str, stock: Any, keys: tuple[str, ...]) -> None:
    is_object = isinstance(stock, Mapping)
    check_value(name, stock, is_object, 'an object such as {"enabled": true}')
    for key, value in stock.items():
        if key not in keys:
            raise unknown_key(name, key, keys)
        is_switch = (key in FIXED or key in IGNORED) and value != "auto"
        check_value(f"{name}.{key}", value, not is_switch or isinstance(value, bool), "true or false")


def _is_enabled(name: str, stock: Mapping[str, Any], precision: str, wanted: object) -> bool:
    value = stock.get("enabled", False)
    if value == "auto":
        return wanted == precision
    check_value(f"{name}.enabled", value, isinstance(value, bool), 'true, false or "auto"')
    return bool(value)


def _check_counterparts(name: str, stock: Mapping[str, Any]) -> None:
    for key, (value, reason) in FIXED.items():
        if stock.get(key, value) not in (value, "auto"):
            raise UserError(f"{name}.{key} = {shown(stock[key])} cannot be used: {reason}; remove it")
    for key, reason in IGNORED.items():
        if key in stock:
            logger.info("%s.%s is ignored: %s", name, key, reason)


def _scaler(stock: Mapping[str, Any]) -> dict[str, Any]:
    """The `grad_scaler` settings that an enabled `fp16` block describes."""
    values = {}
    for key, default in SCALER_DEFAULTS.items():
        value = stock.get(key, default)
        values[key] = default if value == "auto" else value
        if isinstance(default, bool):
            check_value(f"fp16.{key}", value, isinstance(values[key], bool), "true or false")
            continue
        is_number = is_finite_number(values[key]) and values[key] >= 0
        check_value(f"fp16.{key}", value, is_number, "a finite number ≥ 0")
    if values["loss_scale"]:
        return {"type": "constant", "scale": float(values["loss_scale"])}
    power = values["initial_scale_power"]
    is_power = isinstance(power, int) and power <= 32
    check_value("fp16.initial_scale_power", power, is_power, "a whole number, 0 … 32")
    initial = 2.0**power
    for key in ("loss_scale_window", "hysteresis"):
        is_count = isinstance(values[key], int) and values[key] >= 1
        check_value(f"fp16.{key}", values[key], is_count, "a whole number ≥ 1")
    lowest = values["min_loss_scale"]
    is_below = 0 < lowest <= initial
    check_value("fp16.min_loss_scale", lowest, is_below, f"> 0 and at most the initial scale {initial:g}")
    return {
        "type": "dynamic",
        "mode": "deepspeed",
        "initial_scale": initial,
        "min_scale": float(lowest),
        "growth_interval": values["loss_scale_window"],
        "hysteresis": values["hysteresis"],
        "consecutive_hysteresis": values["consecutive_hysteresis"],
    }
