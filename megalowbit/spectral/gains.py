"""Gains on singular values: factors of each direction, and of the residual, in the operand.

A gain function takes singular values in descending order, and returns a factor for each and a factor for the
residual. Metis's schedules are built in. A user's function is named `"package.module:function"`, so a
configuration file passes it to every process. It is tested on a few values when its name is read. Later only
the shape of its result is checked, because checking values would make the host wait.

Metis multiplies singular values after the fifth by 1.5 *before* it computes the residual, which it doubles.
Such a direction ends up with 1.5 + 2·(1 - 1.5) = 0.5. `ysche_seed` repeats that; `ysche` has the intended
factors 1, 1.5 and 2.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from megalowbit.errors import UserError, shown, unknown_name

GainFunction = Callable[[Tensor], tuple[Tensor, float]]
LEADING = 5  # singular values that Metis's schedule does not change
TRIED = 8  # number of singular values for the test of a user's function
LONGEST_REASON = 200  # characters of an exception that a message repeats


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A gain.

    Attributes:
        name: name in configurations.
        function: singular values (k,) fp32 → their factors (k,), and the factor of the residual.
        is_before_residual: compute the residual against the factors times their gains, as Metis does.
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
    """The gain called `name`: built in, or `"package.module:function"`, which is called once as a test.

    Raises:
        UserError: there is none, it cannot be imported, or it does not return what a gain returns.
    """
    if not isinstance(name, str):
        raise UserError(f"gains = {name!r}: expected one of {', '.join(GAINS)}, or 'module:function'")
    if name in GAINS:
        return GAINS[name]
    if ":" not in name:
        raise unknown_name("gains", name, GAINS)
    chosen = Gain(name=name, function=_imported(name))
    # on real numbers, wherever the name is read: a model may just be built without any
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        factors, _ = factors_of(chosen, torch.arange(TRIED, 0, -1, dtype=torch.float32))
        if not factors.isfinite().all():
            raise UserError(f"gains {name!r} returned {shown(factors.tolist())}: return finite factors")
    return chosen


def factors_of(chosen: Gain, values: Tensor) -> tuple[Tensor, float]:
    """The factors (k,) of singular values (k,), and that of the residual.

    Raises:
        UserError: the function raises, or returns something else.
    """
    if isinstance(values, FakeTensor):  # a dry run needs shapes only; a user's function needs values
        return torch.ones_like(values), 1.0
    name = chosen.name
    try:
        returned = chosen.function(values.clone())
    except Exception as error:
        raise UserError(
            f"gains {name!r} raised {_reason(error)} on {len(values)} singular values: it takes any number "
            "of them (k,) and returns (factors (k,), factor of the residual)"
        ) from error
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(
            f"gains {name!r} returned {shown(returned)}: return (factors, factor of the residual)"
        )
    factors, residual = returned
    if not isinstance(factors, Tensor) or factors.shape != values.shape or factors.is_complex():
        got = f"a tensor {tuple(factors.shape)}" if isinstance(factors, Tensor) else shown(factors)
        raise UserError(f"gains {name!r} returned {got}: return a factor for each of {len(values)} values")
    is_number = isinstance(residual, (int, float)) and not isinstance(residual, bool)
    if not is_number or not math.isfinite(residual):
        raise UserError(f"gains {name!r} returned {shown(residual)} for the residual: return a finite number")
    return factors, float(residual)


def _imported(name: str) -> GainFunction:
    module_name, _, function_name = name.partition(":")
    remedy = "name an importable 'module:function'"
    try:
        if not module_name or module_name.startswith("."):
            raise ValueError("it needs the full name of a module")
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        if isinstance(error, ModuleNotFoundError):
            remedy = (
                "add its folder to PYTHONPATH (launch/pretrain.py finds modules in launch/, "
                "not in the working directory)"
            )
        raise UserError(f"gains {name!r} cannot be imported ({_reason(error)}): {remedy}") from None
    if not callable(function):
        raise UserError(f"gains {name!r} is not a function: name one that takes singular values (k,)")
    return function


def _reason(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
