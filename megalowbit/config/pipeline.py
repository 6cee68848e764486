"""DeepSpeed's `pipeline` block: its keys, checked one by one, and what cannot be combined with stages.

DeepSpeed 0.19.8 reads the block without a model of its own: an unknown key is ignored, and `stages` and
`partition` are ignored as well, since its users cut the model in code. Here both mean what they say.
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
    "seed_layers": "weights are made before the model is cut",
    "use_reentrant": "reentrant recomputation needs inputs that are no integers",
}


def fill_pipeline(config: dict[str, Any]) -> None:
    """Check the block of a configuration and fill in, in place, what it leaves out; no block stays none.

    Raises:
        UserError: names the key, its value and what it must be.
    """
    block = config.get("pipeline")
    if not block or not isinstance(block, Mapping):  # a wrong type is found where types are checked
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
    """What a filled configuration sets in the block to other values than the defaults."""
    block = config.get("pipeline") or {}
    return {key: value for key, value in block.items() if value != DEFAULTS[key]}


def stages_of(config: Mapping[str, Any]) -> int:
    """Stages that a filled configuration asks for."""
    stages: int = (config.get("pipeline") or DEFAULTS)["stages"]
    return stages


def partition_of(config: Mapping[str, Any]) -> str:
    """DeepSpeed's name of the partition that a filled configuration asks for."""
    partition: str = (config.get("pipeline") or DEFAULTS)["partition"]
    return "parameters" if partition == BEST else partition


def interval_of(config: Mapping[str, Any]) -> int:
    """Blocks per recomputed segment in a filled configuration."""
    interval: int = (config.get("pipeline") or DEFAULTS)["activation_checkpoint_interval"]
    return interval


def check_beside_stages(config: Mapping[str, Any], settings: EngineSettings, stages: int) -> None:
    """Refuse what needs all layers in one process, where a pipeline has more than one stage.

    Raises:
        UserError: names key and value, and what to set.
    """
    if stages <= 1:
        return
    where = f"cannot be used with pipeline.stages = {stages}"
    stage = zero_stage(config)
    if stage > 1:
        raise UserError(f"zero_optimization.stage = {stage!r} {where}: set it to 1 or 0")
    if settings.gradient_norm != "global":
        raise UserError(f'megalowbit.gradient_norm = {settings.gradient_norm!r} {where}: set it to "global"')
    if settings.layer_scaling.enabled:
        raise UserError(f"megalowbit.layer_scaling.enabled = true {where}: set it to false")
    if settings.regularizer.strength:
        raise UserError(f"megalowbit.regularizer.strength = {settings.regularizer.strength} {where}: set 0")
    recipe: Any = settings.recipe
    while isinstance(recipe, Mapping):
        if recipe.get("parameter_split") is not None:
            raise UserError(
                f"megalowbit.recipe.parameter_split {where}: use split_weight, the in-time split, instead"
            )
        recipe = recipe.get("base")
