"""Gains on singular values: how strongly each direction, and the residual, enters the operand.

A gain function takes singular values in descending order and returns one factor for each, and the residual's
factor. Built in are Metis's schedules; a function of the user's own is named `"package.module:function"`,
so that a configuration file carries it to every process.

Metis multiplies singular values past the fifth by 1.5 *before* it takes the residual, which it doubles: so a
direction past the fifth ends at 1.5 + 2·(1 - 1.5) = 0.5. `ysche_seed` repeats that; `ysche` means what was
meant, 1, 1.5 and 2.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megalowbit.errors import UserError, unknown_name

GainFunction = Callable[[Tensor], tuple[Tensor, float]]
LEADING = 5  # singular values Metis's schedule leaves alone


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A gain.

    Attributes:
        name: what users type.
        function: singular values (k,) fp32 → their factors (k,), and the factor of the residual.
        is_before_residual: whether the residual is taken against the factors with their gains, as in Metis.
    """

    name: str
    function: GainFunction
    is_before_residual: bool = False


def _unit(values: Tensor) -> tuple[Tensor, float]:
    return torch.ones_like(values), 1.0


def _long_tail(values: Tensor) -> tuple[Tensor, float]:
    factors = torch.full_like(values, 1.5)
    factors[:LEADING] = 1.0
    return factors, 2.0


GAINS = MappingProxyType(
    {
        "none": Gain(name="none", function=_unit),
        "ysche": Gain(name="ysche", function=_long_tail),
        "ysche_seed": Gain(name="ysche_seed", function=_long_tail, is_before_residual=True),
    }
)


@functools.lru_cache(maxsize=64)
def gain(name: str) -> Gain:
    """The gain called `name`: built in, or `"package.module:function"`.

    Raises:
        UserError: there is none, or it cannot be imported.
    """
    if not isinstance(name, str):
        raise UserError(f"gains = {name!r}: expected one of {', '.join(GAINS)}, or 'module:function'")
    if name in GAINS:
        return GAINS[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise unknown_name("gains", name, GAINS)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"gains {name!r} cannot be imported ({error}): name a 'module:function'") from None
    if not callable(function):
        raise UserError(f"gains {name!r} is no function: name one that takes singular values (k,)")
    return Gain(name=name, function=function)
