"""Checks a configuration with DeepSpeed's models and torch before anything is allocated.

DeepSpeed's models first read each block alone, so every mistake is reported with its block. Then they read
the complete configuration. No process group is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megalowbit.config.batch_size import MICRO, STEPS, TRAIN
from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.engine.process_start import import_deepspeed
from megalowbit.errors import Problems, UserError, shortened, shown
from megalowbit.layers.recipe import recipe

# DeepSpeed's throughput timer waits for the device twice a step, for a number that telemetry provides anyway.
QUIET: dict[str, Any] = {"log_level": "warning", "timers": {"throughput": {"enabled": False}}}
# the only mpu method that `DeepSpeedConfig` calls; without a process group it calls none
ONE_PROCESS = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
ONE_OF_EACH = {TRAIN: 1, MICRO: 1, STEPS: 1}  # the real batch sizes are checked when they are filled in


def check_parts(parts: DeepSpeedConfigParts) -> None:
    """Reject mistakes in DeepSpeed's blocks and in the recipe, with one line each."""
    problems = Problems()
    with problems.collect():
        check_nested_blocks(parts.deepspeed)
    with problems.collect():
        if parts.settings.recipe is not None:
            recipe(parts.settings.recipe)
    problems.raise_any()


def check_nested_blocks(config: Mapping[str, Any]) -> None:
    """Reject mistakes that DeepSpeed's models find in a complete configuration without our block."""
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    problems = Problems()
    for key, value in config.items():
        with problems.collect():
            if key == "zero_optimization" and isinstance(value, Mapping):
                _check_truth_values(key, value, DeepSpeedZeroConfig)
            if key not in ONE_OF_EACH:
                _read({**ONE_OF_EACH, key: value}, key)
    if not problems:
        _read({**config, **ONE_OF_EACH}, None)
    problems.raise_any()


def _read(config: dict[str, Any], block: str | None) -> None:
    """Read a configuration with DeepSpeed; `block` names the only key that can be wrong, if known."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({**QUIET, **config}, ONE_PROCESS)
    except ValidationError as error:
        problems = Problems()
        for each in error.errors():
            path = [str(part) for part in each["loc"]]
            if block and path[:1] != [block]:  # DeepSpeed validates most blocks separately
                path = [block, *path]
            problems.add(
                UserError(
                    f"DeepSpeed rejects {'.'.join(path) or error.title} = {shown(each['input'])} "
                    f"({shortened(each['msg'])}): correct it (see DeepSpeed's documentation), or remove it"
                )
            )
        raise problems.error() from None
    except Exception as error:  # DeepSpeed raises many kinds of errors for wrong values
        where = f"{block} = {shown(config[block])}" if block else "the configuration"
        reason = shortened(str(error)) or type(error).__name__
        raise UserError(f"DeepSpeed rejects {where} ({reason}): correct it, or remove it") from None


def _check_truth_values(where: str, block: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Reject `true` for a number, which DeepSpeed's models read as 1; also in nested blocks."""
    problems = Problems()
    named = {field.alias: field for field in model.model_fields.values() if field.alias}
    fields = {**model.model_fields, **named}
    for key, value in block.items():
        kinds = _leaves(fields[key].annotation) if key in fields else set()
        inner = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)]
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            problems.add(
                UserError(f"{where}.{key} = {value} is not valid: write a number, not true or false")
            )
        elif isinstance(value, Mapping) and inner:
            with problems.collect():
                _check_truth_values(f"{where}.{key}", value, inner[0])
    problems.raise_any()


def _leaves(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return set().union(*map(_leaves, arguments)) if arguments else {annotation}
