"""Norms that keep fp32 parameters and compute in fp32 in a model that is half precision otherwise.

A norm's weights are few and change little at a step, so half precision saves nothing and loses their updates'
last bits in forward. Hooks cast the input to fp32 and the output back, so neighbours see half precision as
before. Kept parameters are marked with `keep_fp32 = True`: `Float16OptimizerWithFloat16Params` leaves them in
`fp32_from_fp32_groups`, without a master. Not covered: a module that computes with another's parameters, and
norms called as functions (those are autocast's, see `optim.autocast`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError

NORM_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
NORM_CLASS_NAMES = ("*LayerNorm", "*RMSNorm")  # of models that bring their own
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Fp32Modules:
    """Modules that compute in fp32; made by `keep_fp32`.

    Attributes:
        names: of the modules.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = tuple(modules)
        self._modules = tuple(modules.values())
        self._handles: list[Any] = []
        for module in self._modules:
            for parameter in module.parameters():
                if parameter.dtype in HALF_DTYPES:
                    parameter.data = parameter.data.float()
                parameter.keep_fp32 = True  # type: ignore[attr-defined]
            casts = _Casts()
            self._handles += [
                module.register_forward_pre_hook(casts.enter, with_kwargs=True),
                module.register_forward_hook(casts.leave, always_call=True),
            ]

    def remove(self) -> None:
        """Take hooks and marks off; parameters stay fp32."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._modules:
            for parameter in module.parameters():
                if hasattr(parameter, "keep_fp32"):
                    del parameter.keep_fp32


def keep_fp32(model: nn.Module, patterns: Iterable[str] = (), *, norms: bool = True) -> Fp32Modules:
    """Keep modules in fp32; call it before an optimizer is built.

    Args:
        model: fp32 or half; half-precision parameters of the modules become fp32.
        patterns: further modules, by name (`"*.router"`) or class name, as in a shell.
        norms: whether layer, RMS and group norms are kept: torch's, and classes named like them.

    Returns:
        The names, and a way to undo it.

    Raises:
        UserError: a pattern matches nothing, or there is no norm; nothing has been changed then.
    """
    wanted = tuple(patterns)
    matched: set[str] = set()
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        hits = [each for each in wanted if _fits(name, module, each)]
        matched.update(hits)
        if hits or (norms and is_norm(module)):
            found[name] = module
    for pattern in wanted:
        if pattern not in matched:
            raise UserError(
                f"pattern {pattern!r} for fp32 modules matches no module: use names as in "
                "model.named_modules(), or class names"
            )
    if not found:
        raise UserError("the model has no norm to keep in fp32: turn fp32_norms off, or name modules")
    # One in another would cast back too early; the outer one covers it.
    outer = {name: module for name, module in found.items() if not _is_within(name, found)}
    return Fp32Modules(outer)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer, RMS or group norm, by its type or its class's name."""
    if isinstance(module, NORM_CLASSES):
        return True
    name = type(module).__name__
    return any(fnmatchcase(name, pattern) for pattern in NORM_CLASS_NAMES)


def is_kept_fp32(parameter: Tensor) -> bool:
    """Whether a parameter is marked to stay fp32."""
    return getattr(parameter, "keep_fp32", False)


class _Casts:
    """The hooks of one module; a stack, as a module may be called again within its own forward."""

    def __init__(self) -> None:
        self._entered: list[tuple[torch.dtype | None, AbstractContextManager[Any]]] = []

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        device_type = tensors[0].device.type if tensors else "cpu"
        without_autocast: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(device_type):
            without_autocast = torch.autocast(device_type, enabled=False)
        without_autocast.__enter__()
        self._entered.append((tensors[0].dtype if tensors else None, without_autocast))
        return tuple(_widened(x) for x in args), {name: _widened(x) for name, x in kwargs.items()}

    def leave(self, _: nn.Module, __: object, output: Any) -> Any:
        if not self._entered:
            return None  # another hook failed before `enter` came to its turn
        dtype, without_autocast = self._entered.pop()
        without_autocast.__exit__(None, None, None)
        return _narrowed(output, dtype) if dtype in HALF_DTYPES else None


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def _narrowed(output: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(output, Tensor):
        return output.to(dtype) if output.dtype == torch.float32 else output
    if type(output) in (list, tuple):
        return type(output)(_narrowed(each, dtype) for each in output)
    return output


def _fits(name: str, module: nn.Module, pattern: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern))


def _is_within(name: str, others: Iterable[str]) -> bool:
    return any(other != name and (other == "" or name.startswith(f"{other}.")) for other in others)
