"""The dual-range regulariser of Metis: weights neither large nor close to zero.

    R = λ · Σ_W (α₁·ΣW² + α₂·Σ 1/(W² + ε)) / numel(W)

It is decoupled from the loss: its gradient, λ/numel · (2α₁W − 2α₂W/(W² + ε)²), is added to the sums of
gradients once per optimizer step, just before they are inspected and clipped, so it behaves as a term of the
loss would and costs no graph. The second term peaks at |W| = √(ε/3) with 0.65·λα₂/numel·ε^-1.5: with ε =
1e-8 that is 6.5e11·λα₂/numel, and elements within about ±(2λα₂/(numel·cap))^⅓ of zero get the cap instead.
The cap bounds an element, not their norm: a 768 × 3072 weight of deviation 0.02 has a norm of 220 with
λ = 1e-4 and ε = 1e-8 (1.7 % capped), by which clipping then shrinks the loss's gradient too. With ε near the
square of a small weight, 1e-5 … 1e-4 here, it is 0.5 … 0.02 and nothing is capped.
Not covered: numel of a whole weight where tensor parallelism holds a shard of it.
Source: the Metis repository, which has (W + 1e-6)^-2 with a pole at W = -1e-6.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.layers.surgery import bit_layers

CHUNK = 2**22  # elements in fp32 at a time: 16 MiB each for W, its square and its gradient


class DualRangeRegularizer:
    """Adds the gradient of the regulariser to that of the loss.

    It holds layers and not parameters: what a layer has is looked up at each step. All their trainable
    parameters of two and more axes are regularised, except the factors of a split that has not happened yet.

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
        if next(self._weights(), None) is None:
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
        self.value = None
        for weight in self._weights():
            value = self._add_gradient(weight, _gradient_of(weight), loss_scale)
            self.value = value if self.value is None else self.value + value.to(self.value.device)
        assert self.value is not None  # the constructor has seen a weight, and weights do not go
        return self.value

    def _add_gradient(self, weight: Tensor, gradient: Tensor, loss_scale: float) -> Tensor:
        """One weight's share; chunks go by rows, so that strided weights and gradients work too."""
        settings, share = self.settings, self.settings.strength / weight.numel()
        rows = max(1, CHUNK * len(weight) // weight.numel())
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        for part, target in zip(weight.split(rows), gradient.split(rows), strict=True):
            values = part.float()
            square = values.square()
            total += settings.alpha1 * square.sum(dtype=torch.float64)
            inverse = square.add_(settings.epsilon).reciprocal_()
            total += settings.alpha2 * inverse.sum(dtype=torch.float64)
            slope = inverse.square_().mul_(-2 * settings.alpha2).add_(2 * settings.alpha1)
            added = slope.mul_(values).mul_(share).clamp_(-settings.max_gradient, settings.max_gradient)
            target.add_(added, alpha=loss_scale)
        return total * share

    def _weights(self) -> Iterator[nn.Parameter]:
        for layer in self.layers.values():
            is_split = getattr(layer, "is_split", True)
            for name, parameter in layer.named_parameters(recurse=False):
                is_unused = name.startswith("split_") and not is_split
                if parameter.requires_grad and parameter.ndim >= 2 and parameter.numel() and not is_unused:
                    yield parameter


def build_regularizer(
    model: nn.Module, settings: RegularizerSettings, trained: Collection[Tensor]
) -> DualRangeRegularizer | None:
    """The regulariser of a model's low-bit layers, or None where its strength is 0.

    Args:
        model: converted.
        settings: from the configuration.
        trained: parameters of the optimizer; layers with another weight are left alone.

    Raises:
        UserError: it is on, and no low-bit layer is trained.
    """
    if not settings.strength:
        return None
    known = {id(parameter) for parameter in trained}
    layers = {name: layer for name, layer in bit_layers(model).items() if id(layer.weight) in known}
    return DualRangeRegularizer(layers, settings)


def _gradient_of(weight: nn.Parameter) -> Tensor:
    """Where the weight's gradient adds up; made of zeros if the loss has given it none."""
    gradient = getattr(weight, "main_grad", None)
    if gradient is not None:
        return gradient
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
