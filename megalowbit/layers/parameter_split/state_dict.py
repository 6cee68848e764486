"""A weight split into parameters, in a state dict: whole under `weight`, with its parts beside it.

`from_pretrained` and other programs read `weight` alone, and must not find W_R there. Of a split layer a
state dict holds the whole weight, `split_u`, `split_s`, `split_v` and `split_residual`, which is W_R (out,
in); with those the layer goes on bitwise, and they are compared with the whole weight when they are read. A
weight without parts is a whole one: factors become zero. `weight` and factors without `split_residual` are
what our checkpoints hold, where `weight` is W_R.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.parameter_split.parameters import SPLIT_NAMES, has_split_parameters, parts_of
from megalowbit.spectral.weight_split import WeightParts, whole_weight

if TYPE_CHECKING:
    from megalowbit.layers.bitlinear import BitLinear

RESIDUAL = "split_residual"
# The whole weight and its four parts may have been rounded to another dtype since, each once and by half an
# epsilon at most: 2.5 epsilons of the largest of them, if all err alike, and then the sum's own rounding.
MAX_ROUNDINGS = 4


def put_whole_weight(state: MutableMapping[str, Any], prefix: str) -> None:
    """Replace W_R under `weight` by the whole weight, in place; W_R moves to `split_residual`.

    Args:
        state: with the parts of a split layer, weights as (out, in).
        prefix: of the layer's keys.
    """
    weight, factors = f"{prefix}weight", [prefix + name for name in SPLIT_NAMES]
    if not all(name in state for name in (weight, *factors)) or state[weight].dim() != 2:
        return
    residual = state[weight]
    state[weight] = _whole(residual, *(state[name] for name in factors))
    state[prefix + RESIDUAL] = residual


def complete_split(layer: BitLinear, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A state dict from which a layer's parameters can be read under their own names.

    Args:
        layer: with factors or without.
        state_dict: left as it is; may lack everything of the layer.
        prefix: of the layer's keys.

    Raises:
        UserError: it has some parts of a split weight and not the others, which is wrong also where missing
            keys are allowed; or parts that do not add up to the weight beside them; or W_R for a layer that
            has no factors.
    """
    weight, residual = f"{prefix}weight", prefix + RESIDUAL
    names = [prefix + name for name in SPLIT_NAMES]
    if not has_split_parameters(layer):
        _refuse_residual(state_dict, weight, residual, names)
        return state_dict
    if residual in state_dict and not layer._is_in_parameter_layout:
        _check_complete(state_dict, [residual, *names])
        _check_sum(layer, state_dict, prefix)
        value = state_dict[residual]
        state_dict = {name: each for name, each in state_dict.items() if name != residual}
        return {**state_dict, weight: value.t() if layer.is_transposed else value}
    if weight in state_dict and not any(name in state_dict for name in names):
        like = state_dict[weight]
        zeros = [
            torch.zeros(part.shape, dtype=like.dtype, device=like.device) for part in parts_of(layer)[1:]
        ]
        return {**state_dict, **dict(zip(names, zeros, strict=True))}
    if any(name in state_dict for name in names):
        _check_complete(state_dict, [weight, *names])
    return state_dict


def _check_complete(state_dict: Mapping[str, Any], names: list[str]) -> None:
    lacking = [name for name in names if name not in state_dict]
    if lacking:
        found = [name for name in names if name in state_dict]
        raise UserError(
            f"{', '.join(found)} without {', '.join(lacking)} is half of a split weight: load all four, or "
            "the whole weight alone"
        )


@torch.no_grad()
def _check_sum(layer: BitLinear, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Whether parts and whole weight of a state dict are of the same numbers."""
    given = state_dict.get(f"{prefix}weight")
    parts = [state_dict[prefix + name].detach() for name in (RESIDUAL, *SPLIT_NAMES)]
    if given is None or any(each.is_meta or isinstance(each, FakeTensor) for each in (given, *parts)):
        return
    given = given.detach().t() if layer.is_transposed else given.detach()
    shapes = [part.shape for part in parts_of(layer)]
    if [each.shape for each in (given, *parts)] != [shapes[0], *shapes]:
        return  # torch says so when it copies
    if not all(each.is_floating_point() for each in (given, *parts)):
        return
    whole = _whole(*parts)
    eps = max(torch.finfo(each.dtype).eps for each in (given, *parts))
    terms = (given.double(), parts[0].double(), whole.double() - parts[0].double())
    largest = max(float(torch.linalg.vector_norm(each)) for each in terms)
    difference = float(torch.linalg.vector_norm(whole.double() - given.double()))
    if difference > MAX_ROUNDINGS * eps * largest:
        raise UserError(
            f"{prefix}weight and the parts it was split into ({prefix}{RESIDUAL} and the three factors) are "
            "different weights: change all of them, or leave the parts out to load the weight alone"
        )


def _refuse_residual(state_dict: Mapping[str, Any], weight: str, residual: str, names: list[str]) -> None:
    is_whole = residual in state_dict or not all(name in state_dict for name in (weight, *names))
    if is_whole or state_dict[names[-1]].is_meta or not bool(state_dict[names[-1]].any()):
        return
    raise UserError(
        f"{weight} is what is left of a split weight ({', '.join(names)}), and the layer it is for has no "
        "factors: convert the model with the recipe's parameter_split, or load the whole weight"
    )


def _whole(residual: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return whole_weight(WeightParts(residual, u, s, v)).to(residual.dtype)
