"""Checks which settings can be combined with ZeRO stages 1 to 3.

Many keys of `zero_optimization` save memory in ways that change the results, or that megalowbit's checkpoints
and exact master weights do not support. Some of megalowbit's settings need full gradients or weights on every
rank. Each is rejected by name, because DeepSpeed would ignore some of them. Keys that do not affect results
(bucket sizes, prefetching, thresholds, overlap) are passed on to DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.values import check_value
from megalowbit.errors import Problems, UserError, shown

BLOCK = "zero_optimization"
STAGES = (0, 1, 2, 3)
# These optimizers use a parameter's shape, or DeepSpeed constructs them again without their groups: on flat
# shards they would compute another update.
NOT_ELEMENTWISE = frozenset({"adafactor", "adagrad", "lamb", "lbfgs", "muon", "sparseadam"})

# key of the block, rejected value, reason and remedy
REFUSED_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("cpu_offload", True, 'it is an old name: write "offload_optimizer": {"device": "cpu"}'),
    ("cpu_offload_param", True, 'it is an old name: write "offload_param": {"device": "cpu"}'),
    ("zero_quantized_weights", True, "weights would be rounded a second time: remove it"),
    ("zero_quantized_nontrainable_weights", True, "weights would be rounded a second time: remove it"),
    ("zero_quantized_gradients", True, "gradients are reduced in fp32: remove it"),
    ("elastic_checkpoint", True, "checkpoints have the layout of the run: remove it"),
    ("legacy_stage1", True, "DeepSpeed no longer has it: remove it"),
    ("compute_grad_norm", False, "overflows are detected by the norm: remove it"),
    ("round_robin_gradients", True, "gradients are measured in the order of the parameters: remove it"),
    ("load_from_fp32_weights", False, "masters would be loaded from rounded weights: remove it"),
)
# strings that DeepSpeed reads as booleans
BOOLEAN_WORDS = {True: ("1", "on", "t", "true", "y", "yes"), False: ("0", "off", "f", "false", "n", "no")}
# in elements, by hidden size: as transformers 5.23 fills them (integrations/deepspeed.py)
SIZES: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}
OFFLOAD = ("offload_optimizer", "offload_param")


def fill_zero(config: dict[str, Any], hidden_size: int | None = None) -> None:
    """Replace DeepSpeed's old form of stage 0, and `"auto"` bucket sizes, in place.

    Without the model's hidden size, `"auto"` remains.
    """
    if config.get(BLOCK) is False:
        config[BLOCK] = {"stage": 0}
    if hidden_size is not None:
        for key in auto_sizes(config):
            config[BLOCK][key] = SIZES[key](hidden_size)


def auto_sizes(config: Mapping[str, Any]) -> list[str]:
    """Keys of the block whose `"auto"` depends on the model's hidden size."""
    block = config.get(BLOCK)
    return [key for key in SIZES if block.get(key) == "auto"] if isinstance(block, Mapping) else []


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a configuration, in either of DeepSpeed's forms; 0 without the block.

    Raises:
        UserError: it is not a valid stage.
    """
    block = config.get(BLOCK)
    stage = block.get("stage") if isinstance(block, Mapping) else int(block is True)
    if stage is None:
        return 0
    if isinstance(stage, bool) or stage not in STAGES:
        raise UserError(f"{BLOCK}.stage = {shown(stage)} is not a stage: use 0, 1, 2 or 3")
    return int(stage)


def check_zero(config: Mapping[str, Any], settings: EngineSettings) -> None:
    """Reject settings that the configured ZeRO stage does not support.

    Args:
        config: the configuration without its `"megalowbit"` block.
        settings: that block.

    Raises:
        UserError: names the key, its value and the remedy.
    """
    block = config.get(BLOCK)
    if not isinstance(block, Mapping):
        return
    stage = zero_stage(config)
    problems = Problems()
    for key in OFFLOAD:
        with problems.collect():
            _check_offload(key, block.get(key), stage)
    for key, refused, remedy in REFUSED_VALUES:
        value = block.get(key)
        if _is_switched(value, refused):
            problems.add(UserError(f"{BLOCK}.{key} = {shown(value)} cannot be used: {remedy}"))
    with problems.collect():
        _check_block(block)
    bucket = block.get("allgather_bucket_size")
    if stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        message = f"{BLOCK}.allgather_bucket_size = {shown(bucket)} must be even: use {shown(bucket + 1)}"
        problems.add(UserError(message))
    if stage:
        _check_settings(stage, settings, problems)
        _check_config(config, stage, problems)
    problems.raise_any()


def check_parameter_split(config: Mapping[str, Any], recipe: object) -> None:
    """Reject `parameter_split` with ZeRO: it needs full master weights, which ZeRO's stages shard.

    Args:
        config: the configuration without its `"megalowbit"` block.
        recipe: the key `recipe`: a name (no named recipe splits parameters), a block or None.

    Raises:
        UserError: the recipe has `parameter_split` and the stage is 1 or more.
    """
    stage = zero_stage(config)
    if stage == 0:
        return
    while isinstance(recipe, Mapping):
        if "parameter_split" in recipe:
            if recipe["parameter_split"] is not None:
                raise UserError(
                    f"zero_optimization.stage = {stage!r} cannot be used with parameter_split in the recipe, "
                    "which needs full parameters on every rank: set zero_optimization.stage to 0, or use "
                    "split_weight (the in-time split)"
                )
            return
        recipe = recipe.get("base")


def _is_switched(value: object, to: bool) -> bool:
    """Whether DeepSpeed reads a value as the boolean `to`."""
    if isinstance(value, str):
        return value.lower() in BOOLEAN_WORDS[to]
    return isinstance(value, int | float) and value == to


def _check_offload(key: str, offload: Any, stage: int) -> None:
    if offload in (None, False, {}):
        return
    is_object = isinstance(offload, Mapping)
    check_value(f"{BLOCK}.{key}", offload, is_object, 'an object such as {"device": "cpu"}')
    device = "none" if offload.get("device") is None else offload["device"]
    if device == "none":
        return
    if device != "cpu":
        raise UserError(f'{BLOCK}.{key}.device = {shown(device)} is not supported: use "cpu" or "none"')
    if key == "offload_param" and stage != 3:
        raise UserError(f"{BLOCK}.{key} needs stage 3, not {stage}: remove it, or set stage to 3")
    if stage == 0:
        raise UserError(f"{BLOCK}.{key} needs stage 1, 2 or 3, not 0: remove it, or set stage")
    ratio = offload.get("ratio", 1)
    if isinstance(ratio, bool) or ratio != 1:
        raise UserError(
            f"{BLOCK}.{key}.ratio = {shown(ratio)} would use another optimizer for the rest: remove it"
        )
    if offload.get("super_offload"):
        raise UserError(f"{BLOCK}.{key}.super_offload = true uses another optimizer: remove it")


def _check_block(block: Mapping[str, Any]) -> None:
    if block.get("zenflow") not in (None, False, {}):
        raise UserError(f"{BLOCK}.zenflow applies gradients late and only partly: remove it")
    for key in ("stage3_module_granularity_threshold", "module_granularity_threshold"):
        if block.get(key) not in (None, 0):
            raise UserError(
                f"{BLOCK}.{key} = {block[key]!r} fetches full modules, and DeepSpeed's step then fails: "
                'remove it, or name modules in "leaf_module"'
            )
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if block.get(key, 1) not in (None, -1, 0, 1):
            raise UserError(f"{BLOCK}.{key} = {block[key]!r} keeps additional copies of weights: remove it")


def _check_settings(stage: int, settings: EngineSettings, problems: Problems) -> None:
    where = f"cannot be used with {BLOCK}.stage {stage}"
    if settings.layer_scaling.enabled:
        message = (
            f"megalowbit.layer_scaling {where}, where the gradients of all blocks share one buffer and one "
            "scale: set layer_scaling.enabled to false, or stage to 0"
        )
        problems.add(UserError(message))
    moved = (*settings.autocast.float32, *settings.autocast.promote)
    if stage == 3 and settings.autocast.enabled and "linear" in moved:
        message = (
            f"megalowbit.autocast cannot move linear with {BLOCK}.stage 3, where DeepSpeed replaces that "
            "function: leave it in float16, or set stage to 2"
        )
        problems.add(UserError(message))
    if settings.fp32_norms:
        message = (
            f"megalowbit.fp32_norms {where}, whose buffers hold parameters of one precision: set it to "
            "false, or stage to 0"
        )
        problems.add(UserError(message))


def _check_config(config: Mapping[str, Any], stage: int, problems: Problems) -> None:
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(kind, str) and kind.lower() in NOT_ELEMENTWISE:
        message = (
            f"optimizer.type = {kind!r} does not work element by element, which ZeRO's flat shards require: "
            f"set {BLOCK}.stage to 0, or use AdamW"
        )
        problems.add(UserError(message))
    if str(config.get("gradient_allreduce_op", "mean")).lower() == "sum":
        message = f"gradient_allreduce_op = 'sum' needs {BLOCK}.stage 0, not {stage}: use 'mean'"
        problems.add(UserError(message))
    is_prescaled = config.get("prescale_gradients") or config.get("gradient_predivide_factor", 1) != 1
    if stage > 1 and is_prescaled:
        message = (
            f"prescale_gradients and gradient_predivide_factor need {BLOCK}.stage 0 or 1, not {stage}: "
            "remove them"
        )
        problems.add(UserError(message))
