"""Hooks on gradients during backward: amax watch, gradient probe, layer scaling.

Scale strategies and layer scaling need statistics that are lost once gradients are summed in fp32; these
hooks collect them. They must be registered before the gradient buffer, whose hooks remove `.grad`. A step
adds their statistics to the single host read and passes them to the strategy.
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
    """Hooks on a model's gradients; None if nothing needs their statistics.

    Attributes:
        watch: largest half-precision gradients, by group of parameters.
        probe: norms of sampled gradients in fp32 and in half precision.
        layer_scaling: factors by block; its groups are those of the watch.
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
        """Register the hooks that a scaler and layer scaling need; call it before building the optimizer.

        Args:
            model: with its final parameters.
            grad_scaler: the scaler; its `sample` sets the share of parameters or layers to sample.
            layer_scaling: scales the blocks of the model if enabled: `{"enabled": True}`, or settings.

        Raises:
            UserError: the model has no blocks, or no layer that can be probed.
        """
        if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
            raise UserError(
                "gradients are already being summed in main_grad, so instruments would see sums: call "
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
        """The factors that a gradient buffer must divide out."""
        return self.layer_scaling.factor_of if self.layer_scaling is not None else None

    def detach(self) -> None:
        """Remove all hooks; the factors become 1."""
        for each in (self.watch, self.probe, self.layer_scaling):
            if each is not None:
                each.detach()

    def take(self, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        """This step's statistics, (n,) each, on the device; collective over `group`. See `read`.

        Args:
            group: ranks that take the step together; None: this process only.
        """
        taken = []
        if self.watch is not None:
            taken.append(self.watch.take(group).double())
        probed = self.probe.take(group) if self.probe is not None else None
        if probed is not None:
            taken.append(probed)
        return taken

    def read(self, numbers: Sequence[float], loss_scale: float) -> tuple[GradientStatistics, list[float]]:
        """Interpret the numbers of `take` after the host read.

        Returns:
            Statistics for a strategy, and the stored amax of each group for layer scaling.
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
            return statistics, amaxes  # no layer took part, or its gradients were not finite
        # all zero: the layers' own output gradients were flushed to zero, which also counts as a loss
        ratio = math.sqrt(reference / half) if half > 0 else math.inf
        share = flushed / nonzero if nonzero > 0 else 1.0
        return replace(statistics, norm_ratio=ratio, flushed_fraction=share), amaxes

    def prepare(self, grad_scaler: GradScaler | None) -> None:
        """Arm the probe for the coming step, if the scaler needs it."""
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
    """Update the scaler and the factors by block after a step, and arm probes for the next one.

    `each` has one entry for each optimizer stepped together under one scaler. `numbers` are the statistics
    that each of them took, and `loss_scale` is S of that step.
    """
    statistics = []
    scalings: dict[LayerScaling, list[float]] = {}  # several optimizers may share one
    for instruments, own in zip(each, numbers, strict=True):
        seen, amaxes = instruments.read(own, loss_scale)
        statistics.append(seen)
        scaling = instruments.layer_scaling
        if scaling is not None:
            scalings[scaling] = list(map(max, amaxes, scalings.get(scaling, amaxes)))
    attributed = [scaling.update(amaxes, not is_applied, loss_scale) for scaling, amaxes in scalings.items()]
    if grad_scaler is not None and any(attributed):
        grad_scaler.restart_growth()
    elif grad_scaler is not None:
        grad_scaler.update(not is_applied, joined_statistics(statistics))
    for instruments in each:
        instruments.prepare(grad_scaler)


def joined_statistics(each: Sequence[GradientStatistics]) -> GradientStatistics:
    """Merge the statistics of several optimizers of one step: the largest amax, the first probe result."""
    amaxes = [one.amax for one in each if one.amax is not None]
    probed = next((one for one in each if one.norm_ratio is not None), each[0])
    return replace(probed, amax=max(amaxes, default=None))


def complete_instruments(
    instruments: Instruments | None,
    grad_scaler: GradScaler | None,
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
) -> Instruments:
    """`instruments`, completed by the watch that they or the scaler need, with the probe armed.

    Raises:
        UserError: the scaler needs a probe, and there is none.
    """
    instruments = instruments or Instruments()
    if grad_scaler is not None and grad_scaler.probes and instruments.probe is None:
        raise UserError(
            f"{type(grad_scaler).__name__} compares gradients with fp32 ones and needs the model for that: "
            "pass instruments=Instruments.attach(model, grad_scaler)"
        )
    scaling = instruments.layer_scaling
    is_watched = scaling is not None or (grad_scaler is not None and grad_scaler.needs_amax)
    if is_watched and instruments.watch is None:
        if any(hasattr(parameter, "main_grad") for _, parameter in named_parameters):
            who = "layer scaling" if scaling is not None else type(grad_scaler).__name__
            raise UserError(
                f"{who} needs gradients before they are summed: call instruments = "
                "Instruments.attach(model, grad_scaler, …) first, and pass them to LocalDDP and the "
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
