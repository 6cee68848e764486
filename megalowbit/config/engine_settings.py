"""The keys of the `"megalowbit"` block that the engine reads, also without the pretraining loop."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megalowbit.layers.settings import (
    DEFAULT_RECIPE,
    ActivationCheckpointingSettings,
    RegularizerSettings,
)
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
    """What the engine reads from the `"megalowbit"` block."""

    precision: Precision = Field(
        default="bf16",
        description="type of parameters, activations and `.grad`; master weights and gradient sums are "
        "always fp32. If left out, DeepSpeed's `fp16` or `bf16` block decides: an enabled one sets its "
        "precision, and one that is off, with none on, means fp32. Without such a block it is bf16",
    )
    grad_scaler: AnyGradScalerSettings = Field(
        default=NoScalerSettings(),
        description="the loss scale. A section without `type`, or none, is `dynamic` with fp16 and `none` "
        "otherwise",
    )
    recipe: str | dict[str, Any] | None = Field(
        default=None,
        description="a recipe's name or a block, see [Recipes](#recipes). `null`: `mlb.initialize` leaves "
        f"the layers unchanged, a pretraining run takes `{DEFAULT_RECIPE}`",
    )
    regularizer: RegularizerSettings = Field(
        default=RegularizerSettings(),
        description="dual-range regulariser of the low-bit layers' weights; off",
    )
    gradient_norm: Literal["global", "sum_of_norms"] = Field(
        default="global",
        description="what `gradient_clipping` limits and `grad_norm` reports: the norm of all gradients, "
        "or the sum of the parameters' norms, as in Metis",
    )
    layer_scaling: LayerScalingSettings = Field(
        default=LayerScalingSettings(),
        description="a separate factor for the gradients of each block; off. "
        "Needs ZeRO stage 0 and a single pipeline stage",
    )
    log_num_zeros_in_grad: bool = Field(
        default=False,
        description="report `num_zeros`, the number of gradient elements that are exactly zero; costs "
        "another pass over the gradients",
    )
    autocast: AutocastSettings = Field(
        default=AutocastSettings(enabled=False),
        description="`true`: norms, softmax, sums and losses run in fp32, products in half precision; or the "
        "operations to move",
    )
    fp32_norms: bool = Field(
        default=False,
        description="layer norms and RMS norms keep fp32 parameters and compute in fp32. Needs ZeRO stage 0",
    )
    activation_checkpointing: ActivationCheckpointingSettings = Field(
        default=ActivationCheckpointingSettings(),
        description="blocks that recompute their activations in backward; none. In a pipeline use "
        "`pipeline.activation_checkpoint_interval`",
    )
    chunked_cross_entropy: bool | None = Field(
        default=None,
        description="compute output projection and loss in chunks of the vocabulary: the logits never exist "
        "whole, and the model returns none in training. `null`: a pretraining run does so from a vocabulary "
        "of 65,536 on, unless it is a pipeline; `mlb.initialize` does not",
    )
    watchdog: WatchdogSettings = Field(
        default=WatchdogSettings(), description="when to end a run that cannot continue, and how long to wait"
    )
    # left out of the resolved configuration if it is null
    lr_schedule: AnySchedule | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="learning-rate schedule in the place of DeepSpeed's `scheduler`",
    )

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

    @field_validator("recipe")
    @classmethod
    def _layers_are_in_order(cls, value: Any) -> Any:
        return with_listed_layers(value)

    @field_validator("grad_scaler")
    @classmethod
    def _scaler_fits_the_precision(
        cls, value: GradScalerSettings, info: ValidationInfo
    ) -> GradScalerSettings:
        if "precision" in info.data:  # missing if precision itself was invalid
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
        # other recipes that quantise nothing are rejected when layers are converted
        if value.strength and info.data.get("recipe") == "bf16":
            raise ValueError('it acts on low-bit layers, and recipe "bf16" has none: set strength to 0')
        return value


def with_listed_layers(recipe: Any) -> Any:
    """A recipe's name or block with its `layers`, and those of its bases, as lists of pairs.

    The first pattern that matches a layer decides, so their order counts. Objects with the same keys are
    equal in any order: comparisons of configurations, when a run is resumed, would not notice another one.
    """
    if not isinstance(recipe, dict):
        return recipe
    changes = {"base": with_listed_layers(recipe["base"])} if "base" in recipe else {}
    if isinstance(layers := recipe.get("layers"), dict):
        changes["layers"] = [[pattern, each] for pattern, each in layers.items()]
    return {**recipe, **changes}
