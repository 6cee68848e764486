"""The dual-range regulariser of Metis: it keeps weights from becoming large or close to zero.

    R = λ · Σ_W (α₁·ΣW² + α₂·Σ 1/(W² + ε)) / numel(W)

It is decoupled from the loss. Its gradient, λ/numel · (2α₁W − 2α₂W/(W² + ε)²), is added to the summed
gradients once per optimizer step, just before they are checked and clipped. The effect is that of a term of
the loss, without a graph.

Size of the second term: its gradient peaks at |W| = √(ε/3) with 0.65·λα₂/numel·ε^-1.5. With ε = 1e-8 that is
6.5e11·λα₂/numel, so elements within about ±(2λα₂/(numel·cap))^⅓ of zero get the cap instead. The cap bounds
each element, not the norm: a 768 × 3072 weight of standard deviation 0.02 has a norm of 220 with λ = 1e-4 and
ε = 1e-8 (1.7 % capped), and clipping by that norm also shrinks the loss's gradient. With ε near the square of
a small weight, 1e-5 … 1e-4 here, the norm is 0.5 … 0.02 and nothing is capped.

A weight split into parameters is regularised as a whole, since 1/(W² + ε) would penalise its small residual.
The capped gradient reaches the four parts by the chain rule. For a tensor-parallel shard, numel is that of
the full weight, and each rank adds R of its shard; `value` is summed over the ranks.

Source: the Metis repository, which uses (W + 1e-6)^-2 with a pole at W = -1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megalowbit.distributed.sharded_parameters import refuse_sharded
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES, SplitLinear
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.layers.tensor_parallel.linear import Sharding, tensor_group_of
from megalowbit.spectral.weight_split import WeightParts, first_moments, full_weight

CHUNK = 2**22  # elements in fp32 at a time: 16 MiB each for W, its square and its gradient; more if split


class DualRangeRegularizer:
    """Adds the gradient of the regulariser to that of the loss.

    It holds layers, not parameters, and looks the parameters up at each step. All trainable parameters with
    two or more axes are regularised. A split weight counts as one, in four parts, and the trained parts get a
    gradient.

    Args:
        layers: by name, as from `megalowbit.bit_layers`; can be any modules.
        settings: λ, α₁, α₂, ε and the cap.

    Attributes:
        value: R of the last step, 0-dim float64 on the weights' device; None before the first.

    Raises:
        UserError: the layers have no such parameter, or torch has sharded them.
    """

    def __init__(self, layers: Mapping[str, nn.Module], settings: RegularizerSettings) -> None:
        self.layers = dict(layers)
        self.settings = settings
        self.value: Tensor | None = None
        if next(self.weights(), None) is None and next(self._split_layers(), None) is None:
            raise UserError(
                f"megalowbit.regularizer.strength = {settings.strength} but no low-bit layer is trained: "
                "set it to 0, or use a recipe that quantises"
            )
        self._refuse_sharded()

    def _refuse_sharded(self) -> None:
        for name, layer in self.layers.items():
            weights = ((f"{name}.{part}", each) for part, each in layer.named_parameters())
            refuse_sharded("DualRangeRegularizer", weights, "leave it out, because it needs whole weights")

    @torch.no_grad()
    def add_gradients(self, loss_scale: float = 1.0) -> Tensor:
        """Add to `main_grad`, or to `.grad` if a parameter has no `main_grad`. Once per optimizer step.

        Args:
            loss_scale: S by which these gradients are multiplied.

        Returns:
            R itself, without S: 0-dim float64 on the weights' device.

        Raises:
            UserError: torch has sharded the weights.
        """
        if self.value is None:  # they may have been sharded since this was created
            self._refuse_sharded()
        values = [
            self.add_piece(weight, _gradient_of(weight), loss_scale, numel=full_numel(weight))
            for weight in self.weights()
        ]
        values += [self._add_to_parts(parts, loss_scale) for parts in self._split_layers()]
        self.value = values[0]  # the constructor has checked that there is a weight
        for value in values[1:]:
            self.value = self.value + value.to(self.value.device)
        self.value = self.sum_over_shards(self.value)
        return self.value

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum R over the tensor-parallel ranks; either all layers are sharded or none. Collective."""
        group = tensor_group_of(self.layers.values())
        return value if group is None else group.sum(value.clone())

    @torch.no_grad()
    def add_piece(self, weight: Tensor, gradient: Tensor, loss_scale: float, *, numel: int) -> Tensor:
        """Add the gradient of a weight, or of some of its elements, to that of the loss, in place.

        Chunks consist of rows, so strided weights and gradients work too.

        Args:
            weight: elements of the weight, with one or more axes, in any precision.
            gradient: the gradient of these elements, in the same shape.
            loss_scale: S by which `gradient` is multiplied.
            numel: number of elements of the full weight.

        Returns:
            R of these elements, without S: 0-dim float64 on the weight's device.
        """
        rows, share = _rows_at_a_time(weight), self.settings.strength / numel
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        for part, target in zip(weight.split(rows), gradient.split(rows), strict=True):
            value, slope = self._value_and_slope(part.float(), share)
            target.add_(slope, alpha=loss_scale)
            total += value
        return total

    def _add_to_parts(self, parts: WeightParts, loss_scale: float) -> Tensor:
        """Add the gradient of one split weight. Rows of W need only these rows of W_R and U."""
        rows, share = _rows_at_a_time(parts.residual), self.settings.strength / parts.residual.numel()
        residual, u, s, v = (_gradient_of(part) if part.requires_grad else None for part in parts)
        total = torch.zeros((), dtype=torch.float64, device=parts.residual.device)
        for start in range(0, len(parts.residual), rows):
            here = slice(start, start + rows)
            chunk = parts._replace(residual=parts.residual[here], u=parts.u[here])
            value, slope = self._value_and_slope(full_weight(chunk).float(), share)
            of_factors = first_moments(slope, chunk)
            for target, added in (
                (None if residual is None else residual[here], slope),
                (None if u is None else u[here], of_factors.u),
                (s, of_factors.s),
                (v, of_factors.v),
            ):
                if target is not None:
                    target.add_(added, alpha=loss_scale)
            total += value
        return total

    def _value_and_slope(self, values: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """R of some weights (fp32), 0-dim float64, and its capped gradient; `share` is λ/numel."""
        settings = self.settings
        square = values.square()
        value = settings.alpha1 * square.sum(dtype=torch.float64)
        inverse = square.add_(settings.epsilon).reciprocal_()
        value += settings.alpha2 * inverse.sum(dtype=torch.float64)
        slope = inverse.square_().mul_(-2 * settings.alpha2).add_(2 * settings.alpha1).mul_(values)
        return value * share, slope.mul_(share).clamp_(-settings.max_gradient, settings.max_gradient)

    def weights(self) -> Iterator[nn.Parameter]:
        """Weights that are one parameter, without those split into four parts."""
        for layer in self.layers.values():
            # Factors are not weights; before their layer is split they are zeros.
            is_split = isinstance(layer, SplitLinear) and layer.is_split
            in_parts = ("weight", *SPLIT_NAMES) if is_split else SPLIT_NAMES
            for name, parameter in layer.named_parameters(recurse=False):
                is_whole = name not in in_parts
                if parameter.requires_grad and parameter.ndim >= 2 and parameter.numel() and is_whole:
                    yield parameter

    def _split_layers(self) -> Iterator[WeightParts]:
        """Weights in four parts, of which at least one is trained."""
        for layer in self.layers.values():
            if isinstance(layer, SplitLinear) and layer.is_split and layer.weight.numel():
                parts = WeightParts(*layer.parts())
                if any(part.requires_grad for part in parts):
                    yield parts


def build_regularizer(
    model: nn.Module, settings: RegularizerSettings, trained: Collection[Tensor]
) -> DualRangeRegularizer | None:
    """The regulariser of a model's low-bit layers, or None if its strength is 0.

    Layers whose weight is not among the `trained` parameters are skipped.

    Raises:
        UserError: the strength is not 0, and no low-bit layer is trained.
    """
    if not settings.strength:
        return None
    known = {id(parameter) for parameter in trained}
    layers = {name: layer for name, layer in bit_layers(model).items() if id(layer.weight) in known}
    return DualRangeRegularizer(layers, settings)


def full_numel(weight: Tensor) -> int:
    """Elements of the weight of which this may be a tensor-parallel shard."""
    sharding: Sharding | None = getattr(weight, "sharding", None)
    return weight.numel() if sharding is None else math.prod(sharding.full_shape(weight.shape))


def _rows_at_a_time(weight: Tensor) -> int:
    return max(1, CHUNK * len(weight) // weight.numel())


def _gradient_of(weight: Tensor) -> Tensor:
    """The tensor in which the weight's gradient is summed; new zeros if the loss has given it none."""
    if weight.grad is not None:  # with a `main_grad`, this is its memory, or is copied there later
        return weight.grad
    gradient: Tensor | None = getattr(weight, "main_grad", None)
    if gradient is None:
        gradient = weight.grad = torch.zeros_like(weight)
    return gradient
