"""The dual-range regulariser of Metis: weights neither large nor close to zero.

    R = λ · Σ_W (α₁·ΣW² + α₂·Σ 1/(W² + ε)) / numel(W)

It is decoupled from the loss: its gradient, λ/numel · (2α₁W − 2α₂W/(W² + ε)²), is added to the sums of
gradients once per optimizer step, just before they are inspected and clipped, so it behaves as a term of the
loss would and costs no graph. The second term peaks at |W| = √(ε/3) with 0.65·λα₂/numel·ε^-1.5: with ε =
1e-8 that is 6.5e11·λα₂/numel, and elements within about ±(2λα₂/(numel·cap))^⅓ of zero get the cap instead.
The cap bounds an element, not their norm: a 768 × 3072 weight of deviation 0.02 has a norm of 220 with
λ = 1e-4 and ε = 1e-8 (1.7 % capped), by which clipping then shrinks the loss's gradient too. With ε near the
square of a small weight, 1e-5 … 1e-4 here, it is 0.5 … 0.02 and nothing is capped.
A weight split into parameters is regularised whole, since 1/(W² + ε) would punish its small residual; the
capped gradient goes to the four parts by the chain rule.
Of a weight in tensor-parallel shards, numel is the whole's, and each rank adds R of its own shard; `value` is
summed over the ranks.
Source: the Metis repository, which has (W + 1e-6)^-2 with a pole at W = -1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES, SplitLinear
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.layers.tensor_parallel.linear import Sharding, tensor_group_of
from megalowbit.spectral.weight_split import WeightParts, first_moments, full_weight

CHUNK = 2**22  # elements in fp32 at a time: 16 MiB each for W, its square and its gradient; more where split


class DualRangeRegularizer:
    """Adds the gradient of the regulariser to that of the loss.

    It holds layers and not parameters: what a layer has is looked up at each step. All their trainable
    parameters of two and more axes are regularised; a split weight is one of them, in four parts, of which
    those that are trained get a gradient.

    Args:
        layers: by name, as from `megalowbit.bit_layers`; any modules will do.
        settings: λ, α₁, α₂, ε and the cap.

    Attributes:
        value: R of the last step, 0-dim float64 on the weights' device; None before the first.

    Raises:
        UserError: the layers have no such parameter.
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

    @torch.no_grad()
    def add_gradients(self, loss_scale: float = 1.0) -> Tensor:
        """Add to `main_grad`, or to `.grad` where a parameter has no `main_grad`. Once per optimizer step.

        Args:
            loss_scale: S by which the gradients there are multiplied.

        Returns:
            R itself, without S: 0-dim float64 on the weights' device.
        """
        values = [
            self.add_piece(weight, _gradient_of(weight), loss_scale, numel=full_numel(weight))
            for weight in self.weights()
        ]
        values += [self._add_to_parts(parts, loss_scale) for parts in self._split_layers()]
        self.value = values[0]  # the constructor has seen a weight, and weights do not go
        for value in values[1:]:
            self.value = self.value + value.to(self.value.device)
        self.value = self.sum_over_shards(self.value)
        return self.value

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """R of all tensor-parallel ranks, from that of each; all layers are cut or none. Collective."""
        group = tensor_group_of(self.layers.values())
        return value if group is None else group.sum(value.clone())

    @torch.no_grad()
    def add_piece(self, weight: Tensor, gradient: Tensor, loss_scale: float, *, numel: int) -> Tensor:
        """Add the gradient of a weight, or of some of its elements, to that of the loss, in place.

        Chunks go by rows, so that strided weights and gradients work too.

        Args:
            weight: elements of the weight, in one axis or more and any precision.
            gradient: theirs, in the same shape.
            loss_scale: S by which `gradient` is multiplied.
            numel: elements of the whole weight.

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
        """One split weight's share. Rows of W need W_R and U of those rows only, so chunks go by rows too."""
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
        """R of some weights in fp32, 0-dim float64, and its capped gradient; `share` is λ/numel."""
        settings = self.settings
        square = values.square()
        value = settings.alpha1 * square.sum(dtype=torch.float64)
        inverse = square.add_(settings.epsilon).reciprocal_()
        value += settings.alpha2 * inverse.sum(dtype=torch.float64)
        slope = inverse.square_().mul_(-2 * settings.alpha2).add_(2 * settings.alpha1).mul_(values)
        return value * share, slope.mul_(share).clamp_(-settings.max_gradient, settings.max_gradient)

    def weights(self) -> Iterator[nn.Parameter]:
        """Weights that are one parameter; those in four parts are not among them."""
        for layer in self.layers.values():
            # Factors are no weights; those of a split that has not happened yet are zeros.
            is_split = isinstance(layer, SplitLinear) and layer.is_split
            in_parts = ("weight", *SPLIT_NAMES) if is_split else SPLIT_NAMES
            for name, parameter in layer.named_parameters(recurse=False):
                is_whole = name not in in_parts
                if parameter.requires_grad and parameter.ndim >= 2 and parameter.numel() and is_whole:
                    yield parameter

    def _split_layers(self) -> Iterator[WeightParts]:
        """Weights in four parts, of which one at least is trained."""
        for layer in self.layers.values():
            if isinstance(layer, SplitLinear) and layer.is_split and layer.weight.numel():
                parts = WeightParts(*layer.parts())
                if any(part.requires_grad for part in parts):
                    yield parts


def build_regularizer(
    model: nn.Module, settings: RegularizerSettings, trained: Collection[Tensor]
) -> DualRangeRegularizer | None:
    """The regulariser of a model's low-bit layers, or None where its strength is 0.

    Layers with a weight that is not among the `trained` parameters are left alone.

    Raises:
        UserError: it is on, and no low-bit layer is trained.
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
    """Where the weight's gradient adds up; made of zeros if the loss has given it none."""
    if weight.grad is not None:  # where there is a `main_grad`, its memory, or what will be copied there
        return weight.grad
    gradient: Tensor | None = getattr(weight, "main_grad", None)
    if gradient is None:
        gradient = weight.grad = torch.zeros_like(weight)
    return gradient
