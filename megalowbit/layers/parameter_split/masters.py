"""One layer's split, in what an optimizer holds of it: masters of W_R, U, S and V, and their state.

W_R keeps the state of the whole weight, whose gradient is its own. Those of U, S and V follow from it by a
rule for each kind of moment ("project"; counts of steps are copied), or all four start anew ("reset"). What
is allocated here is the same on ranks that compute and on ranks that only take over. See
`engine.parameters.split` for who does, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalowbit.spectral.weight_split import (
    WeightParts,
    first_moments,
    full_weight,
    second_moments,
    weight_parts,
)

Masters = tuple[Tensor, Tensor, Tensor, Tensor]
# What torch's optimizers keep of a parameter, and by which rule a factor's follows from the whole weight's.
MOMENT_RULES = MappingProxyType(
    {
        "exp_avg": first_moments,
        "momentum_buffer": first_moments,
        "exp_avg_sq": second_moments,
        "max_exp_avg_sq": second_moments,
    }
)


def without_rule(state: Mapping[str, Any]) -> str | None:
    """The first entry of a weight's optimizer state that cannot be projected; `None` if there is none."""
    for name, value in state.items():
        if _is_moment(name, value) and name not in MOMENT_RULES:
            return name
    return None


@torch.no_grad()
def largest_singular_value(masters: Masters, *, is_split: bool) -> float:
    """That of the whole weight, or a bound above it where that is far from float16's end. Reads a device.

    Arguments are those of `split_masters`.
    """
    whole = full_weight(WeightParts(*masters)) if is_split else masters[0].detach()
    bound = torch.linalg.vector_norm(whole, dtype=torch.float64).item()  # of all of them together
    if bound < torch.finfo(torch.float16).max:
        return bound
    return torch.linalg.svdvals(whole.double())[0].item()


@torch.no_grad()
def split_masters(
    masters: Masters,
    states: Sequence[dict[str, Any]],
    *,
    is_split: bool,
    is_projected: bool,
    is_computed: bool,
) -> list[Tensor]:
    """Split the weight that the masters hold, in place.

    Args:
        masters: of W_R (the whole weight, where it is not split yet), U, S and V.
        states: the optimizer's state of each, empty before its first step.
        is_split: whether the whole weight is W_R + U·diag(S)·V.
        is_projected: whether state is projected; otherwise it is dropped, as before the first step.
        is_computed: whether this process computes; otherwise it only makes room.

    Returns:
        All tensors that were computed, or that the results of another process belong in, in a fixed order.
    """
    new = None
    if is_computed:
        whole = full_weight(WeightParts(*masters)) if is_split else masters[0].detach()
        # half precision only under an optimizer without masters
        new = weight_parts(whole if whole.dtype == torch.float64 else whole.float(), len(masters[2]))
        for target, value in zip(masters, new, strict=True):
            target.copy_(value)
    if is_projected:
        return [*masters, *_project(states[0], states[1:], masters[1:], new)]
    for state in states:
        state.clear()
    return list(masters)


def _project(
    of_weight: Mapping[str, Any],
    of_factors: Sequence[dict[str, Any]],
    factors: Sequence[Tensor],
    new: WeightParts | None,
) -> list[Tensor]:
    """Replace the factors' state by what follows from the whole weight's; returns its moments."""
    moments = []
    for state in of_factors:
        state.clear()
    for name, value in of_weight.items():
        if not _is_moment(name, value):
            for state in of_factors:
                state[name] = value.clone() if isinstance(value, Tensor) else value
            continue
        found: Iterable[Tensor | None] = (None, None, None)
        if new is not None:
            found = MOMENT_RULES[name](value, new)
        for state, factor, moment in zip(of_factors, factors, found, strict=True):
            state[name] = torch.zeros_like(factor, dtype=value.dtype)
            if moment is not None:
                state[name].copy_(moment)
            moments.append(state[name])
    return moments


def _is_moment(name: str, value: object) -> bool:
    """Whether an entry is of the parameter's elements; counts of steps are numbers, or 0-dim tensors."""
    return isinstance(value, Tensor) and (value.ndim > 0 or name in MOMENT_RULES)
