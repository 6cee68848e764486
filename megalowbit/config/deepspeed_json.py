"""The DeepSpeed half of a configuration: read, checked and filled in before anything heavy is imported.

DeepSpeed's keys stay DeepSpeed's; ours are in the `"megalowbit"` block, of which the engine reads
what `EngineSettings` lists. What DeepSpeed would ignore, misread or fail on much later is
refused here in one line: unknown keys, batch sizes that do not multiply, parallelism that is not possible
yet. Stock `fp16`/`bf16` blocks are translated and every `"auto"` gets its documented value, so that what is
handed on is complete. This file imports neither torch nor deepspeed: the command line runs it first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megalowbit.config.auto_values import guessed_values
from megalowbit.config.batch_size import MICRO, STEPS, TRAIN, fill_batch_sizes
from megalowbit.config.keys import check_keys, check_no_auto_left
from megalowbit.config.loop_sections import LOOP_SECTIONS
from megalowbit.config.optimizer import fill_optimizer, fill_scheduler
from megalowbit.config.pipeline import fill_pipeline
from megalowbit.config.stock_precision import BLOCKS as STOCK_BLOCKS
from megalowbit.config.stock_precision import take_stock_precision
from megalowbit.config.values import check_parameter_split, check_values, is_finite_number
from megalowbit.config.zero import check_zero, fill_zero
from megalowbit.errors import Problems, UserError, invalid_settings, shown, unknown_name
from megalowbit.json_text import read_json_object
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.optim.loss_scale.settings import (
    GradScalerSettings,
    Precision,
    build_grad_scaler,
    default_scaler_type,
)
from megalowbit.optim.precision.settings import AutocastSettings
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.values import SettingsModel

BLOCK = "megalowbit"
FILLED_KEYS = (TRAIN, MICRO, STEPS, "gradient_clipping", "optimizer", "scheduler", *STOCK_BLOCKS)
DEFAULT_CLIPPING = 1.0  # DeepSpeed 0.19.8's own default


class EngineSettings(SettingsModel):
    """What the engine reads from the `"megalowbit"` block.

    Attributes:
        precision: of parameters, activations and `.grad`; masters and gradient sums are fp32 in any case.
            Left out, a stock `fp16` or `bf16` block decides; one that is explicitly off, with none on, means
            fp32, as in DeepSpeed. Without either it is bf16.
        grad_scaler: loss scale; by default dynamic with fp16 and none otherwise.
        recipe: a recipe's name, or `{"base": name, …}`; None leaves the layers as they are.
        regularizer: dual-range regulariser of the low-bit layers' weights; off by default.
        gradient_norm: what `gradient_clipping` limits: the norm of all gradients, or the sum of the
            parameters' norms, as Metis does.
        layer_scaling: a factor of its own for the gradients of each block; off by default.
        log_num_zeros_in_grad: count gradient elements that are exactly zero; one more pass over them.
        autocast: run operations by class, see `optim.op_classes`; off, all run in their inputs' precision.
        fp32_norms: layer and RMS norms keep fp32 parameters and compute in fp32.
        watchdog: after how long a run that cannot go on ends.
    """

    precision: Precision = Field(default="bf16", description="fp16, bf16 or fp32")
    grad_scaler: GradScalerSettings = Field(default=GradScalerSettings(), validate_default=True)
    recipe: str | dict[str, Any] | None = None
    regularizer: RegularizerSettings = RegularizerSettings()
    gradient_norm: Literal["global", "sum_of_norms"] = "global"
    layer_scaling: LayerScalingSettings = LayerScalingSettings()
    log_num_zeros_in_grad: bool = False
    autocast: AutocastSettings = AutocastSettings(enabled=False)
    fp32_norms: bool = False
    watchdog: WatchdogSettings = WatchdogSettings()

    @model_validator(mode="before")
    @classmethod
    def _name_the_scaler(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        scaler = {} if values.get("grad_scaler") is None else values["grad_scaler"]
        precision = values.get("precision", "bf16")
        if isinstance(scaler, dict) and scaler.get("type") is None:
            return {**values, "grad_scaler": {**scaler, "type": default_scaler_type(precision)}}
        return values

    @field_validator("grad_scaler")
    @classmethod
    def _scaler_fits_the_precision(
        cls, value: GradScalerSettings, info: ValidationInfo
    ) -> GradScalerSettings:
        if "precision" in info.data:  # it is not if it was invalid itself
            build_grad_scaler(value, info.data["precision"])
        return value

    @field_validator("autocast", "fp32_norms")
    @classmethod
    def _there_is_half_precision(cls, value: Any, info: ValidationInfo) -> Any:
        is_on = value.enabled if isinstance(value, AutocastSettings) else value
        if is_on and info.data.get("precision") == "fp32":
            raise ValueError("with precision fp32 everything is fp32 already: set it to false")
        return value

    @field_validator("regularizer")
    @classmethod
    def _regularizer_has_layers(cls, value: RegularizerSettings, info: ValidationInfo) -> RegularizerSettings:
        # other recipes that quantise nothing are found out when layers are converted
        if value.strength and info.data.get("recipe") == "bf16":
            raise ValueError('it acts on low-bit layers, and recipe "bf16" has none: set strength to 0')
        return value


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfigParts:
    """A configuration taken apart.

    Attributes:
        deepspeed: complete and without our block, to be handed to DeepSpeed.
        megalowbit: our block as it was written, with what stock blocks added.
        settings: the engine's part of it, validated.
        guesses: `key = value` of each `"auto"` for which nobody gave a value.
    """

    deepspeed: dict[str, Any]
    megalowbit: dict[str, Any]
    settings: EngineSettings
    guesses: tuple[str, ...] = ()


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file; duplicate keys, NaN and Infinity are refused.

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
    """Take a DeepSpeed configuration apart, check it and fill it in.

    Args:
        config: a file, or its content, which is not changed.
        world_size: data-parallel processes, for the arithmetic of batch sizes.
        total_steps: optimizer steps of the run, for `"auto"` in the scheduler.
        has_optimizer: the caller brings an optimizer, so the file need not describe one.
        hidden_size: of the model, for `"auto"` in ZeRO's bucket sizes.

    Raises:
        UserError: a line for each mistake, naming key, value and remedy.
    """
    raw = _copy(config) if isinstance(config, dict) else load_json(config)
    block = raw.pop(BLOCK, {})
    if not isinstance(block, dict):
        raise UserError(f'"{BLOCK}" = {shown(block)} must be an object {{…}}')
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
        lambda: fill_scheduler(raw, total_steps),
        lambda: block.update(take_stock_precision(raw, block)),
    )
    for step in steps:
        with problems.collect():
            step()
    with problems.collect():
        settings = _read_settings(block)
        check_zero(raw, settings)
    with problems.collect():  # what was not filled in because it is wrong has been reported
        check_no_auto_left({key: raw[key] for key in raw if not problems or key not in FILLED_KEYS})
    problems.raise_any()
    guesses = guessed_values(written, raw, given_precision=given_precision, precision=settings.precision)
    return DeepSpeedConfigParts(deepspeed=raw, megalowbit=block, settings=settings, guesses=guesses)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(config)
    except RecursionError:
        raise UserError("the configuration is nested too deeply: give objects of a few levels") from None


def _check_block_keys(block: dict[str, Any]) -> None:
    problems = Problems()
    known = (*LOOP_SECTIONS, *EngineSettings.model_fields)
    for key in block:
        if key not in known:
            problems.add(unknown_name("key", f"{BLOCK}.{key}", [f"{BLOCK}.{name}" for name in known]))
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
    if not is_finite_number(value) or value < 0:
        raise UserError(f"gradient_clipping = {shown(value)} must be a finite number ≥ 0 (0: no clipping)")
    config["gradient_clipping"] = float(value)
