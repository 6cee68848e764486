"""DeepSpeed's `pipeline` block: its keys, and the settings that cannot be combined with stages.

DeepSpeed 0.19.8 does not validate the block: it ignores unknown keys, and also `stages` and `partition`,
because its users partition the model in code. megalowbit partitions the model as these two keys say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.values import check_value, unknown_key
from megalowbit.config.zero import zero_stage
from megalowbit.errors import Problems, UserError, unknown_name
from megalowbit.values import is_count

BEST = "best"  # DeepSpeed's name for its default, which is "parameters"
DEFAULTS: dict[str, Any] = {
    "stages": 1,
    "partition": BEST,
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
    "use_reentrant": False,
}
PARTITIONS = (BEST, "parameters", "uniform", "type:block")
# keys that must have this value, and why
FIXED = {
    "seed_layers": "weights are initialised before the model is partitioned",
    "use_reentrant": "reentrant recomputation does not work with integer inputs",
}


def fill_pipeline(config: dict[str, Any]) -> None:
    """Check the `pipeline` block, if there is one, and fill in its defaults, in place.

    Raises:
        UserError: names the key, its value and the valid values.
    """
    block = config.get("pipeline")
    if not block or not isinstance(block, Mapping):  # `check_values` reports a wrong type
        return
    problems = Problems()
    for key, value in block.items():
        with problems.collect():
            _check_key(key, value)
    problems.raise_any()
    config["pipeline"] = {**DEFAULTS, **block, "use_reentrant": False}


def _check_key(key: str, value: Any) -> None:
    if key not in DEFAULTS:
        raise unknown_key("pipeline", key, DEFAULTS)
    if value is None and key == "use_reentrant":
        return
    default = DEFAULTS[key]
    if isinstance(default, bool):
        check_value(f"pipeline.{key}", value, isinstance(value, bool), "true or false")
    elif isinstance(default, int):
        lowest = int(key == "stages")
        is_valid = is_count(value, least=lowest)
        check_value(f"pipeline.{key}", value, is_valid, f"a whole number ≥ {lowest}")
    elif value not in PARTITIONS:
        raise unknown_name(f"pipeline.{key}", value, PARTITIONS)
    if key in FIXED and value is not DEFAULTS[key]:
        raise UserError(f"pipeline.{key} = true cannot be used: {FIXED[key]}; remove it")


def set_by_user(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the block in a filled configuration whose values are not the defaults."""
    block = config.get("pipeline") or {}
    return {key: value for key, value in block.items() if value != DEFAULTS[key]}


def stages_of(config: Mapping[str, Any]) -> int:
    """The number of stages in a filled configuration."""
    stages: int = (config.get("pipeline") or DEFAULTS)["stages"]
    return stages


def partition_of(config: Mapping[str, Any]) -> str:
    """DeepSpeed's name of the partition method in a filled configuration."""
    partition: str = (config.get("pipeline") or DEFAULTS)["partition"]
    return "parameters" if partition == BEST else partition


def interval_of(config: Mapping[str, Any]) -> int:
    """The number of blocks in a recomputed segment, in a filled configuration."""
    interval: int = (config.get("pipeline") or DEFAULTS)["activation_checkpoint_interval"]
    return interval


def check_pipeline(config: Mapping[str, Any], settings: EngineSettings, stages: int) -> None:
    """If the pipeline has more than one stage, reject settings that need all layers in one process.

    Raises:
        UserError: a line for each such setting, with its value and the remedy.
    """
    if stages <= 1:
        return
    where = f"cannot be used with pipeline.stages = {stages}"
    problems = Problems()
    stage, norm, strength = zero_stage(config), settings.gradient_norm, settings.regularizer.strength
    if stage > 1:
        problems.add(UserError(f"zero_optimization.stage = {stage!r} {where}: set it to 1 or 0"))
    if norm != "global":
        problems.add(UserError(f'megalowbit.gradient_norm = {norm!r} {where}: set it to "global"'))
    if settings.layer_scaling.enabled:
        problems.add(UserError(f"megalowbit.layer_scaling.enabled = true {where}: set it to false"))
    if strength:
        problems.add(UserError(f"megalowbit.regularizer.strength = {strength} {where}: set 0"))
    if settings.activation_checkpointing.every:
        message = f"megalowbit.activation_checkpointing.every = {settings.activation_checkpointing.every}"
        remedy = "set it to 0, and pipeline.activation_checkpoint_interval instead"
        problems.add(UserError(f"{message} {where}: {remedy}"))
    if settings.chunked_cross_entropy:
        problems.add(UserError(f"megalowbit.chunked_cross_entropy = true {where}: set it to false"))
    recipe: Any = settings.recipe
    while isinstance(recipe, Mapping):
        if recipe.get("parameter_split") is not None:
            message = (
                f"megalowbit.recipe.parameter_split {where}: use split_weight, the in-time split, instead"
            )
            problems.add(UserError(message))
        recipe = recipe.get("base")
    problems.raise_any()
