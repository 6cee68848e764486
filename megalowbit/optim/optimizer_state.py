"""Saved optimizer states: are they the ones of this optimizer?

torch checks the number of groups and parameters only; a moment of another shape is loaded silently and fails,
or broadcasts, at the next step. Here every tensor is compared first, so that a state either fits wholly or
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from megalowbit.errors import UserError

REMEDY = "resume with the model and parameter groups it was saved with"


def find_key(state: Mapping[str, Any], names: Sequence[str], default: Any = None) -> Any:
    """The first of `names` present in `state`, newest name first.

    Raises:
        UserError: none is present and there is no default.
    """
    for name in names:
        if name in state:
            return state[name]
    if default is not None:
        return default
    raise UserError(
        f"optimizer state lacks {names[0]!r}: found {sorted(map(str, state)) or 'nothing'}; {REMEDY}"
    )


def check_inner_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check that a torch optimizer's state has the groups and tensor shapes of `optimizer`.

    Raises:
        UserError: it has not.
    """
    missing = [name for name in ("state", "param_groups") if name not in saved]
    if missing:
        raise UserError(f"optimizer state lacks {', '.join(missing)}: {REMEDY}")
    have = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved["param_groups"]]
    if have != found:
        raise UserError(f"optimizer state has groups of {found} parameters, the model {have}: {REMEDY}")
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    indices = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape != parameter.shape:
                raise UserError(
                    f"{name} of parameter {index} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(parameter.shape)}: {REMEDY}"
                )


def check_masters(saved: Sequence[Sequence[torch.Tensor]], masters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that saved fp32 masters have the groups and shapes of `masters`; empty groups do not matter.

    Raises:
        UserError: they have not.
    """
    found = [len(group) for group in saved if len(group)]
    have = [len(group) for group in masters if len(group)]
    if found != have:
        raise UserError(f"saved masters come in groups of {found}, the model's in {have}: {REMEDY}")
    pairs = zip(chain.from_iterable(saved), chain.from_iterable(masters), strict=True)
    for index, (source, target) in enumerate(pairs):
        if source.shape != target.shape:
            shapes = f"{tuple(source.shape)}, the model's {tuple(target.shape)}"
            raise UserError(f"saved master {index} has shape {shapes}: {REMEDY}")


@torch.no_grad()
def copy_masters(saved: Sequence[Sequence[torch.Tensor]], masters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy saved fp32 masters that `check_masters` has found to fit."""
    for source, target in zip(chain.from_iterable(saved), chain.from_iterable(masters), strict=True):
        target.copy_(source)
