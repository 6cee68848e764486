"""Reads, checks and fills in the DeepSpeed part of a configuration, before anything heavy is imported.

DeepSpeed's keys keep their meaning; ours are in the `"megalowbit"` block, of which the engine reads the keys
of `EngineSettings`. Mistakes that DeepSpeed would ignore, misread or report much later are rejected here, one
line each: unknown keys, batch sizes that do not multiply, unsupported parallelism. The stock blocks `fp16`
and `bf16` are translated, and every `"auto"` gets its documented value, so DeepSpeed receives a complete
configuration. This file imports neither torch nor deepspeed, because the command line runs it first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalowbit.config.auto_values import guessed_values
from megalowbit.config.batch_size import MICRO, STEPS, TRAIN, fill_batch_sizes
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.keys import check_keys, check_no_auto_left
from megalowbit.config.optimizer import fill_lr_schedule, fill_optimizer, fill_scheduler
from megalowbit.config.pipeline import fill_pipeline
from megalowbit.config.stock_precision import BLOCKS as STOCK_BLOCKS
from megalowbit.config.stock_precision import take_stock_precision
from megalowbit.config.values import check_value, check_values, unknown_key
from megalowbit.config.zero import check_parameter_split, check_zero, fill_zero
from megalowbit.errors import Problems, UserError, invalid_settings
from megalowbit.json_text import is_finite_number, read_json_object
from megalowbit.values import BLOCK

# Read by the pretraining loop. An engine without the loop accepts them, because one file serves both.
LOOP_SECTIONS = (
    "model", "data", "run", "checkpoint", "telemetry", "trackio", "loss_guard", "validation", "static_inputs",
    "late_switch", "speculation", "oscillation_reset", "profile", "samples", "histograms",
)  # fmt: skip
FILLED_KEYS = (TRAIN, MICRO, STEPS, "gradient_clipping", "optimizer", "scheduler", *STOCK_BLOCKS)
DEFAULT_CLIPPING = 1.0  # DeepSpeed 0.19.8's own default


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfigParts:
    """The parts of a configuration.

    Attributes:
        deepspeed: the complete configuration for DeepSpeed, without the `"megalowbit"` block.
        megalowbit: the `"megalowbit"` block as written, plus the values from stock blocks.
        settings: the engine's part of the block, validated.
        guesses: `key = value` of each `"auto"` that was replaced by a default.
    """

    deepspeed: dict[str, Any]
    megalowbit: dict[str, Any]
    settings: EngineSettings
    guesses: tuple[str, ...] = ()


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file; duplicate keys, NaN and Infinity are rejected.

    Raises:
        UserError: names the file and, for a syntax error, line and column.
    """
    return read_json_object(Path(path), is_strict=True)


def read_deepspeed_config(
    config: str | Path | dict[str, Any],
    *,
    world_size: int = 1,
    total_steps: int | None = None,
    has_optimizer: bool = False,
    hidden_size: int | None = None,
) -> DeepSpeedConfigParts:
    """Read a DeepSpeed configuration, check it and fill it in.

    Args:
        config: a file, or its content, which is not modified.
        world_size: number of data-parallel processes, to check the batch sizes.
        total_steps: optimizer steps of the run, for `"auto"` in the schedule.
        has_optimizer: the caller passes an optimizer, so the file need not describe one.
        hidden_size: hidden size of the model, for `"auto"` in ZeRO's bucket sizes.

    Raises:
        UserError: one line for each mistake, with key, value and remedy.
    """
    raw = _copy(config) if isinstance(config, dict) else load_json(config)
    block = raw.pop(BLOCK, {})
    check_value(f'"{BLOCK}"', block, isinstance(block, dict), "an object {…}")
    written, given_precision = _copy(raw), block.get("precision")
    problems = Problems()
    steps: tuple[Callable[[], object], ...] = (
        lambda: _check_block_keys(block),
        lambda: check_parameter_split(raw, block.get("recipe")),
        lambda: check_keys(raw, (*EngineSettings.model_fields, *LOOP_SECTIONS)),
        lambda: check_values(raw),
        lambda: fill_pipeline(raw),
        lambda: fill_zero(raw, hidden_size),
        lambda: fill_batch_sizes(raw, world_size),
        lambda: _fill_clipping(raw),
        lambda: _fill_optimizer(raw, has_optimizer),
        lambda: fill_lr_schedule(raw, block, total_steps),
        lambda: fill_scheduler(raw, total_steps),
        lambda: block.update(take_stock_precision(raw, block)),
    )
    for step in steps:
        with problems.collect():
            step()
    with problems.collect():
        settings = _read_settings(block)
        check_zero(raw, settings)
    with problems.collect():  # an invalid key keeps its "auto", but has been reported already
        check_no_auto_left({key: raw[key] for key in raw if not problems or key not in FILLED_KEYS})
    problems.raise_any()
    guesses = guessed_values(written, raw, given_precision=given_precision, precision=settings.precision)
    return DeepSpeedConfigParts(deepspeed=raw, megalowbit=block, settings=settings, guesses=guesses)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(config)
    except RecursionError:
        raise UserError("the configuration is nested too deeply: use objects of a few levels") from None


def _check_block_keys(block: dict[str, Any]) -> None:
    problems = Problems()
    known = (*LOOP_SECTIONS, *EngineSettings.model_fields)
    for key in block:
        if key not in known:
            problems.add(unknown_key(BLOCK, key, known))
    problems.raise_any()


def _fill_optimizer(config: dict[str, Any], has_optimizer: bool) -> None:
    if config.get("optimizer") is not None:
        fill_optimizer(config)
    elif not has_optimizer:
        raise UserError('optimizer is missing: add for example {"type": "AdamW", "params": {"lr": 3e-4}}')


def _read_settings(block: dict[str, Any]) -> EngineSettings:
    ours = {key: value for key, value in block.items() if key in EngineSettings.model_fields}
    try:
        return EngineSettings.model_validate(ours)
    except ValidationError as error:
        raise invalid_settings(error, BLOCK, EngineSettings) from None


def _fill_clipping(config: dict[str, Any]) -> None:
    value = config.get("gradient_clipping")
    if value is None or value == "auto":
        value = DEFAULT_CLIPPING
    is_valid = is_finite_number(value) and value >= 0
    check_value("gradient_clipping", value, is_valid, "a finite number ≥ 0 (0: no clipping)")
    config["gradient_clipping"] = float(value)
