"""What looks at gradients, or scales them, while backward makes them: watch, probe, factors by block.

Scale strategies and layer scaling need figures that are gone once gradients have been added up in fp32; these
hooks take them. They must be there before the gradient buffer, whose hooks take `.grad` away. A step puts
their figures into the one packet that the host reads, and tells strategies what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from megalowbit.errors import UserError, invalid_settings
from megalowbit.optim.gradients.buffer import FactorOf
from megalowbit.optim.loss_scale.base import GradientStatistics, GradScaler
from megalowbit.optim.statistics.amax import GradientWatch
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings
from megalowbit.optim.statistics.probe import GradientProbe


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Hooks on a model's gradients; None where nobody asks for their figures.

    Attributes:
        watch: largest half-precision gradients, by group of parameters.
        probe: norms of sampled gradients in fp32 and in half precision.
        layer_scaling: factors by block; its groups are the watch's.
    """

    watch: GradientWatch | None = None
    probe: GradientProbe | None = None
    layer_scaling: LayerScaling | None = None

    @classmethod
    def attach(
        cls,
        model: torch.nn.Module,
        grad_scaler: GradScaler | None,
        *,
        layer_scaling: LayerScalingSettings | Mapping[str, Any] | None = None,
    ) -> Instruments:
        """Hook onto `model` what a scaler and layer scaling ask for; before the optimizer is made.

        Args:
            model: with its final parameters.
            grad_scaler: whose `sample` says how much is looked at.
            layer_scaling: scales the blocks of the model if enabled: `{"enabled": True}`, or settings.

        Raises:
            UserError: the model has no blocks, or no layer that can be probed.
        """
        if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
            raise UserError(
                "gradients are being added up already, so instruments would see sums: call "
                "Instruments.attach before LocalDDP and before the optimizer"
            )
        if isinstance(layer_scaling, Mapping):
            try:
                layer_scaling = LayerScalingSettings.model_validate(layer_scaling)
            except ValidationError as error:
                raise invalid_settings(error, "layer_scaling", LayerScalingSettings) from None
        scaling = None
        if layer_scaling is not None and layer_scaling.enabled:
            scaling = LayerScaling.from_settings(model, layer_scaling)
        probe = None
        if grad_scaler is not None and grad_scaler.probes:
            probe = GradientProbe(model, sample=grad_scaler.sample)
        instruments = cls(probe=probe, layer_scaling=scaling)
        return complete_instruments(instruments, grad_scaler, list(model.named_parameters()))

    @property
    def factor_of(self) -> FactorOf | None:
        """What a gradient buffer has to divide by."""
        return self.layer_scaling.factor_of if self.layer_scaling is not None else None

    def take(self, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        """This step's figures, (n,) each and on the device; collective over `group`. See `read`.

        Args:
            group: ranks that take the step together; None: this process alone.
        """
        taken = []
        if self.watch is not None:
            taken.append(self.watch.take(group).double())
        probed = self.probe.take(group) if self.probe is not None else None
        if probed is not None:
            taken.append(probed)
        return taken

    def read(self, numbers: Sequence[float], loss_scale: float) -> tuple[GradientStatistics, list[float]]:
        """What the numbers of `take` mean, once they have been read from the device.

        Returns:
            Statistics for a strategy, and the stored maxima by group for layer scaling.
        """
        num_groups = self.watch.num_groups if self.watch is not None else 0
        amaxes, probed = list(numbers[:num_groups]), numbers[num_groups:]
        unscaled = [
            amax / loss_scale / (self.layer_scaling.factor_of_group(group) if self.layer_scaling else 1.0)
            for group, amax in enumerate(amaxes)
        ]
        statistics = GradientStatistics(loss_scale=loss_scale, amax=max(unscaled, default=None))
        if not probed:
            return statistics, amaxes
        reference, half, flushed, nonzero, compared = probed
        if not (compared > 0 and math.isfinite(reference) and math.isfinite(half)):
            return statistics, amaxes  # no layer took part, or what it saw was not finite
        # all zero: the layers' own output gradients have been flushed, which is no less of a loss
        ratio = math.sqrt(reference / half) if half > 0 else math.inf
        share = flushed / nonzero if nonzero > 0 else 1.0
        return replace(statistics, norm_ratio=ratio, flushed_fraction=share), amaxes

    def prepare(self, grad_scaler: GradScaler | None) -> None:
        """Arm the probe for the coming step, if the scaler wants it."""
        if self.probe is not None:
            self.probe.is_armed = grad_scaler is not None and grad_scaler.wants_probe


def adapt(
    each: Sequence[Instruments],
    grad_scaler: GradScaler | None,
    numbers: Sequence[Sequence[float]],
    *,
    is_applied: bool,
    loss_scale: float,
) -> None:
    """Let scaler and factors by block learn from a step, and arm probes for the next one.

    `each` belongs to one optimizer of those stepped together, under one scaler; `numbers` are what each of
    them took, and `loss_scale` is S of that step.
    """
    statistics = []
    scalings: dict[LayerScaling, list[float]] = {}  # several optimizers may share one
    for instruments, own in zip(each, numbers, strict=True):
        seen, amaxes = instruments.read(own, loss_scale)
        statistics.append(seen)
        scaling = instruments.layer_scaling
        if scaling is not None:
            scalings[scaling] = list(map(max, amaxes, scalings.get(scaling, amaxes)))
    blamed = [scaling.update(amaxes, not is_applied, loss_scale) for scaling, amaxes in scalings.items()]
    if grad_scaler is not None and any(blamed):
        grad_scaler.restart_growth()
    elif grad_scaler is not None:
        grad_scaler.update(not is_applied, joined_statistics(statistics))
    for instruments in each:
        instruments.prepare(grad_scaler)


def joined_statistics(each: Sequence[GradientStatistics]) -> GradientStatistics:
    """What several optimizers of one step saw, as one: the largest maximum, the first probe that told."""
    amaxes = [one.amax for one in each if one.amax is not None]
    probed = next((one for one in each if one.norm_ratio is not None), each[0])
    return replace(probed, amax=max(amaxes, default=None))


def complete_instruments(
    instruments: Instruments | None,
    grad_scaler: GradScaler | None,
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
) -> Instruments:
    """`instruments` with the watch that they or the scaler need, and the probe armed for the first step.

    Raises:
        UserError: the scaler probes, and there is no probe.
    """
    instruments = instruments or Instruments()
    if grad_scaler is not None and grad_scaler.probes and instruments.probe is None:
        raise UserError(
            f"{type(grad_scaler).__name__} compares gradients with fp32 ones, for which it needs the model: "
            "pass instruments=Instruments.attach(model, grad_scaler)"
        )
    scaling = instruments.layer_scaling
    is_watched = scaling is not None or (grad_scaler is not None and grad_scaler.needs_amax)
    if is_watched and instruments.watch is None:
        if any(hasattr(parameter, "main_grad") for _, parameter in named_parameters):
            who = "layer scaling" if scaling is not None else type(grad_scaler).__name__
            raise UserError(
                f"{who} looks at gradients before they are added up: call instruments = "
                "Instruments.attach(model, grad_scaler, …) first, and pass them on to LocalDDP and the "
                "optimizer"
            )
        watch = GradientWatch(
            named_parameters,
            sample=grad_scaler.sample if grad_scaler is not None else 1.0,
            group_of=scaling.group_of if scaling is not None else None,
            num_groups=scaling.num_groups if scaling is not None else 1,
        )
        instruments = replace(instruments, watch=watch)
    instruments.prepare(grad_scaler)
    return instruments
