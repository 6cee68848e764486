"""Which `"auto"` of a configuration was filled in with a value that nobody gave.

Transformers takes these from its TrainingArguments, and `mlb.initialize` has nothing to take them from: a
configuration written for the Trainer would train with another learning rate, and nothing would say so. What
follows from other values (bucket sizes, a product of batch sizes, total steps) or is the same everywhere
(`warmup_min_lr` 0) is left out.
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
    """`key = value` of each `"auto"` that was a guess.

    `config` has DeepSpeed's keys, valid, as they were written, `filled` the same filled in. `given_precision`
    is that of our block, or None, and `precision` the one that trains.
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
    """Two of the three are needed; each that lacks to these is taken for 1."""
    is_open = {key: config.get(key) in (None, "auto") for key in (TRAIN, MICRO, STEPS)}
    if not is_open[TRAIN] and is_open[MICRO] + is_open[STEPS] < 2:
        return []
    ones = (STEPS,) if not is_open[TRAIN] else (MICRO, STEPS)
    # steps that are not mentioned are 1 in DeepSpeed too
    return [key for key in ones if is_open[key] and (key == MICRO or _is_auto(config, key))]


def _guessed_precision(config: Mapping[str, Any], given: object, precision: str) -> list[str]:
    """Nothing where our block or an enabled one says which."""
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
