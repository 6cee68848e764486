"""A BitLinear whose weight is split into parameters: y = Q(x)·Q(W_R)ᵀ + (Q(x)·Vᵀ)·(U·S)ᵀ + b.

A layer whose recipe has `parameter_split` owns `split_u` (out, k), `split_s` (k,) and `split_v` (k, in) from
its making on, all zero and unused until the split: so parameter lists, optimizer groups and checkpoints have
one shape before and after. Only W_R is quantised; how the factors are multiplied is `weight_factors`.

Whether a layer is split follows from what it holds: V has rows of length 1 after a split and zeros before,
also where the weight itself is zero. The split itself is `engine.parameter_split`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe
from megalowbit.spectral.weight_split import WeightParts, whole_weight

if TYPE_CHECKING:
    from megalowbit.layers.bitlinear import BitLinear

SPLIT_NAMES = ("split_u", "split_s", "split_v")
# Decay of S alone by a factor scales U·diag(S)·V by that factor, as the same decay scales W_R.
DECAY_RULES = MappingProxyType({"split_u": False, "split_s": True, "split_v": False})


def has_split_parameters(layer: BitLinear) -> bool:
    """Whether the layer can be split."""
    return "split_v" in layer._parameters


def add_split_parameters(layer: BitLinear, recipe: Recipe) -> None:
    """Give the layer zero factors beside its weight, where the recipe asks for them."""
    if recipe.parameter_split is None:
        return
    weight, rank = layer.weight, recipe.parameter_split.rank_of(*layer.sizes)
    shapes = ((layer.out_features, rank), (rank,), (rank, layer.in_features))
    layer._parameters = {**layer._parameters}  # a layer made from another shares its dictionary
    for name, shape in zip(SPLIT_NAMES, shapes, strict=True):
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        layer.register_parameter(name, nn.Parameter(zeros, requires_grad=weight.requires_grad))


def check_split_parameters(layer: BitLinear, recipe: Recipe) -> None:
    """Refuse a recipe whose split does not fit the layer's parameters; without a split any recipe fits.

    Raises:
        UserError: the layer has no factors, or of another rank.
    """
    if recipe.parameter_split is None:
        return
    rank = recipe.parameter_split.rank_of(*layer.sizes)
    found = len(layer.split_s) if has_split_parameters(layer) else 0
    if found != rank:
        raise UserError(
            f"recipe {recipe.name!r} has a parameter_split of rank {rank}, but the layer was made with "
            f"{f'one of rank {found}' if found else 'none'}: convert the model with this recipe"
        )


def parts_of(layer: BitLinear) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer's W_R, U, S and V; W_R is its `weight`."""
    return layer.weight, layer.split_u, layer.split_s, layer.split_v


@torch.no_grad()
def merged_weight(layer: BitLinear) -> Tensor:
    """The whole weight (out, in) of a layer, split or not, in the dtype of its parameter."""
    if not layer.is_split:
        return layer.weight.detach()
    parts = WeightParts(*(part.detach() for part in parts_of(layer)))
    return whole_weight(parts).to(layer.weight.dtype)


@torch.no_grad()
def holds_split(layer: BitLinear) -> bool:
    """Whether the layer's parameters are those of a split weight; tensors without values never are."""
    if not has_split_parameters(layer) or layer.split_v.is_meta or isinstance(layer.split_v, FakeTensor):
        return False
    return bool(layer.split_v.any())
