"""Finds the `"auto"` values of a configuration that were replaced by a default, for a warning.

Transformers takes these values from its `TrainingArguments`, which `mlb.initialize` does not have. Without
the warning, a configuration written for the Trainer would silently train with another learning rate. Values
that follow from others (bucket sizes, a product of batch sizes, total steps) or that are the same everywhere
(`warmup_min_lr` 0) are not reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalowbit.config.batch_size import MICRO, STEPS, TRAIN
from megalowbit.config.optimizer import OPTIMIZER_AUTO
from megalowbit.config.stock_precision import BLOCKS as STOCK_BLOCKS
from megalowbit.errors import shown

GUESSED_OF_SCHEDULER = ("warmup_num_steps", "cos_min_ratio")


def guessed_values(
    config: Mapping[str, Any], filled: Mapping[str, Any], *, given_precision: object, precision: str
) -> tuple[str, ...]:
    """List `key = value` for each `"auto"` that was replaced by a default.

    Args:
        config: DeepSpeed's keys as written; they must be valid.
        filled: the same keys after filling in.
        given_precision: `precision` of the `"megalowbit"` block, or None.
        precision: the precision of the training.
    """
    keys = [
        *_guessed_batch_sizes(config),
        *(["gradient_clipping"] if _is_auto(config, "gradient_clipping") else []),
    ]
    values = {key: filled[key] for key in keys}
    for block, names in (("optimizer", tuple(OPTIMIZER_AUTO)), ("scheduler", GUESSED_OF_SCHEDULER)):
        written, params = _params(config, block), _params(filled, block)
        values |= {f"{block}.params.{name}": params[name] for name in names if _is_auto(written, name)}
    guesses = [f"{key} = {shown(value)}" for key, value in values.items()]
    return (*guesses, *_guessed_precision(config, given_precision, precision))


def _guessed_batch_sizes(config: Mapping[str, Any]) -> list[str]:
    """Keys that were set to 1 because fewer than two of the three are given."""
    is_open = {key: config.get(key) in (None, "auto") for key in (TRAIN, MICRO, STEPS)}
    if not is_open[TRAIN] and is_open[MICRO] + is_open[STEPS] < 2:
        return []
    ones = (STEPS,) if not is_open[TRAIN] else (MICRO, STEPS)
    # gradient_accumulation_steps that is left out is 1 in DeepSpeed too, so it is not a guess
    return [key for key in ones if is_open[key] and (key == MICRO or _is_auto(config, key))]


def _guessed_precision(config: Mapping[str, Any], given: object, precision: str) -> list[str]:
    """Empty if the `"megalowbit"` block or an enabled stock block sets the precision."""
    blocks = {name: config[name].get("enabled") for name in STOCK_BLOCKS if name in config}
    if given is not None or True in blocks.values():
        return []
    switches = [
        f"{name}.enabled = {str(STOCK_BLOCKS[name] == precision).lower()}"
        for name, value in blocks.items()
        if value == "auto"
    ]
    return [f"{', '.join(switches)} (it trains in {precision})"] if switches else []


def _is_auto(config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get(key) == "auto")


def _params(config: Mapping[str, Any], block: str) -> Mapping[str, Any]:
    return (config.get(block) or {}).get("params") or {}
