"""What the engine reads from the `"megalowbit"` block: each option is declared here, once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megalowbit.layers.settings import RegularizerSettings
from megalowbit.optim.loss_scale.base import GradScalerSettings
from megalowbit.optim.loss_scale.registry import (
    AnyGradScalerSettings,
    NoScalerSettings,
    Precision,
    build_grad_scaler,
    default_scaler_type,
)
from megalowbit.optim.precision.op_classes import AutocastSettings
from megalowbit.optim.schedules.factors import AnySchedule
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.values import SettingsModel


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
        autocast: run operations by class, see `optim.precision.op_classes`; off, all run in their inputs'
            precision.
        fp32_norms: layer and RMS norms keep fp32 parameters and compute in fp32.
        watchdog: after how long a run that cannot go on ends.
        lr_schedule: of the learning rate, instead of DeepSpeed's `scheduler`; None: that one, or none. Not
            written out where there is none.
    """

    precision: Precision = Field(default="bf16", description="fp16, bf16 or fp32")
    grad_scaler: AnyGradScalerSettings = NoScalerSettings()
    recipe: str | dict[str, Any] | None = None
    regularizer: RegularizerSettings = RegularizerSettings()
    gradient_norm: Literal["global", "sum_of_norms"] = "global"
    layer_scaling: LayerScalingSettings = LayerScalingSettings()
    log_num_zeros_in_grad: bool = False
    autocast: AutocastSettings = AutocastSettings(enabled=False)
    fp32_norms: bool = False
    watchdog: WatchdogSettings = WatchdogSettings()
    lr_schedule: AnySchedule | None = Field(default=None, exclude_if=lambda value: value is None)

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
