"""Splits a weight into the parameters W = W_R + U·diag(S)·V, and projects an optimizer's moments.

The factors are the k largest singular triples, computed exactly, and the residual W_R is computed against
them. The sum equals the weight up to the rounding of its dtype. The gradients of the parts follow from the
gradient M of the full weight by the chain rule at the new factors. First moments are sums of gradients, so
the same linear map applies to them. Second moments are sums of squares. Under Adam's assumption that the
elements of M are independent with zero mean, each part's second moment is a sum with squared coefficients.

Products are in float64, so TF32 settings do not affect a weight. Not here: quantised factors, see `split`;
parameters are quantised when they are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WeightParts(NamedTuple):
    """A weight (out, in) in four parts.

    Attributes:
        residual: W_R (out, in).
        u: (out, k), orthonormal columns after a split.
        s: (k,), descending then.
        v: (k, in), orthonormal rows then.
    """

    residual: Tensor
    u: Tensor
    s: Tensor
    v: Tensor


class FactorMoments(NamedTuple):
    """A moment of each factor, in the factors' shapes."""

    u: Tensor
    s: Tensor
    v: Tensor


@torch.no_grad()
def weight_parts(weight: Tensor, rank: int) -> WeightParts:
    """Split a weight (out, in), fp32 or fp64, by k = rank, at most the smaller size.

    Contiguous parts in the weight's dtype, in new memory.
    """
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    u, s, v = u[:, :rank].contiguous(), s[:rank].clone(), v[:rank].contiguous()
    residual = (weight.double() - _low_rank(u, s, v)).to(weight.dtype)
    return WeightParts(residual, u, s, v)


@torch.no_grad()
def full_weight(parts: WeightParts) -> Tensor:
    """W_R + U·diag(S)·V (out, in), rounded once to fp32; fp64 stays fp64."""
    whole = parts.residual.double() + _low_rank(parts.u, parts.s, parts.v)
    return whole if parts.residual.dtype == torch.float64 else whole.float()


@torch.no_grad()
def first_moments(moment: Tensor, parts: WeightParts) -> FactorMoments:
    """First moments of the new parts' factors: M·Vᵀ·S, diag(Uᵀ·M·Vᵀ), S·Uᵀ·M; M (out, in) is the weight's."""
    u, s, v = parts.u.double(), parts.s.double(), parts.v.double()
    moment = moment.double()
    along_v = moment @ v.t()  # (out, k)
    return FactorMoments(along_v * s, (u * along_v).sum(0), s[:, None] * (u.t() @ moment))


@torch.no_grad()
def second_moments(moment: Tensor, parts: WeightParts) -> FactorMoments:
    """Second moments of the factors, from the weight's (≥ 0): the same map, every coefficient squared."""
    return first_moments(moment, WeightParts(parts.residual, *(part.double().square() for part in parts[1:])))


def _low_rank(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return (u.double() * s.double()) @ v.double()
