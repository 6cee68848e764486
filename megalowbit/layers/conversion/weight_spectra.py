"""Singular values of weights as they are, and as the recipe's forward rounds them.

The rounded weight is read from the layer itself: a product with the identity matrix, whose rows are not
rounded, gives the matrix that the forward multiplies with, whatever layout, split or transform the recipe
has. The decomposition is LAPACK's, in float64: no random method and no truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.recipe import Recipe

UNROUNDED = "fp32"


class WeightSpectrum(NamedTuple):
    """Singular values of a weight, descending; each has min(out_features, in_features).

    Attributes:
        layer: its name.
        shape: (out_features, in_features).
        plain: of the weight.
        rounded: of the weight as the forward rounds it.
        error: of the difference of both.
    """

    layer: str
    shape: tuple[int, int]
    plain: Tensor
    rounded: Tensor
    error: Tensor


def weight_spectra(
    model: nn.Module, progress: Callable[[str, int, int], None] = lambda *_: None
) -> list[WeightSpectrum]:
    """The spectra of all low-bit layers of a converted model, which is changed and of no use afterwards.

    Args:
        model: in fp32, on one process.
        progress: called before each layer with its name, its number from 1, and how many there are.
    """
    layers = bit_layers(model)
    found = []
    for number, (name, layer) in enumerate(layers.items(), start=1):
        progress(name, number, len(layers))
        plain = layer.weight.detach().float()
        rounded = rounded_weight(layer)
        values = [torch.linalg.svdvals(each.double()) for each in (plain, rounded, rounded - plain)]
        found.append(WeightSpectrum(name, (plain.shape[0], plain.shape[1]), *values))
    return found


def rounded_weight(layer: BitLinear) -> Tensor:
    """The weight that the forward multiplies with, (out_features, in_features) in fp32.

    The layer's recipe and bias are changed.
    """
    layer.recipe = _of_weights(layer.recipe)
    layer.shared_input = layer.chooser = layer.static_input = None
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    identity = torch.eye(layer.in_features, device=layer.weight.device)
    with torch.no_grad():
        rounded: Tensor = layer.eval()(identity).T
    return rounded


def _of_weights(recipe: Recipe) -> Recipe:
    """The recipe with inputs that are not rounded, multiplied without a low-bit GEMM."""
    return replace(recipe, q_forward_input=UNROUNDED, split_input=None, gemm="bf16")
