"""DeepSpeed's three batch sizes, of which two determine the third.

`train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × processes`. DeepSpeed drops
the remainder of a division and then reports a wrong product. Here the message names the division that fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalowbit.config.values import check_value
from megalowbit.errors import UserError
from megalowbit.values import is_count

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def fill_batch_sizes(config: dict[str, Any], world_size: int) -> None:
    """Set all three keys in `config`, in place, for `world_size` data-parallel processes.

    `"auto"` counts as not given. A key that the others do not determine becomes 1.

    Raises:
        UserError: neither the batch size nor the micro-batch size is given, a value is not a positive
            integer, or the three do not multiply.
    """
    given = {key: _read(config, key) for key in (TRAIN, MICRO, STEPS)}
    train, micro, steps = given[TRAIN], given[MICRO], given[STEPS]
    if train is None and micro is None and "auto" not in (config.get(TRAIN), config.get(MICRO)):
        raise UserError(f"{MICRO} is missing: set it, or {TRAIN}")
    if train is None:
        micro, steps = micro or 1, steps or 1
        train = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = _divide(train, world_size * steps, f"{world_size} processes × {STEPS} {steps}")
    elif steps is None:
        steps = _divide(train, world_size * micro, f"{world_size} processes × {MICRO} {micro}")
    if train != micro * steps * world_size:
        raise UserError(
            f"{TRAIN} {train} is not {MICRO} {micro} × {STEPS} {steps} × {world_size} processes = "
            f"{micro * steps * world_size}: change one of them, or remove {TRAIN}"
        )
    config.update({TRAIN: train, MICRO: micro, STEPS: steps})


def data_size_of(config: Mapping[str, Any]) -> int:
    """The number of data-parallel processes implied by the three keys; 1 if they do not determine it."""
    sizes = [size for key in (TRAIN, MICRO, STEPS) if isinstance(size := config.get(key), int) and size > 0]
    if len(sizes) < 3:
        return 1
    train, micro, steps = sizes
    return 1 if train % (micro * steps) else int(train // (micro * steps))


def _read(config: dict[str, Any], key: str) -> int | None:
    value: int | None = config.get(key)
    if value is None or value == "auto":
        return None
    check_value(key, value, is_count(value), "a whole number ≥ 1")
    return value


def _divide(train: int, divisor: int, what: str) -> int:
    if train % divisor:
        raise UserError(
            f"{TRAIN} {train} is not a multiple of {what} = {divisor}: use {-(-train // divisor) * divisor}"
        )
    return train // divisor
