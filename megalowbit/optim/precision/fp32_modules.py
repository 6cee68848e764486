"""Norms with fp32 parameters and fp32 arithmetic in a model that is otherwise half precision.

A norm has few weights that change little in a step, so half precision saves nothing, and forward would lose
the last bits of their updates. Hooks cast the input to fp32 and the output back, so neighbouring modules
still see half precision. The parameters are marked with `keep_fp32`: `Float16OptimizerWithFloat16Params`
keeps them in `fp32_from_fp32_groups`, without a master. In a copy of the model they stay fp32 too.

Not covered: a module that computes with another one's parameters; norms called as functions (use autocast,
see `optim.precision.autocast`); an autocast entered inside a compiled function: enter it outside, or use
`attach_autocast`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.errors import UserError, shown
from megalowbit.values import require_module

NORM_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
NORM_CLASS_NAMES = ("*LayerNorm", "*RMSNorm")  # norm classes defined by models
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Fp32Modules:
    """Modules that compute in fp32; made by `keep_fp32`.

    Attributes:
        names: names of the modules.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = tuple(modules)
        self._kept = [_casts_of(module) or _Casts(name, module) for name, module in modules.items()]
        for casts in self._kept:
            casts.num_holders += 1

    def remove(self) -> None:
        """Remove hooks and marks from modules that no other call keeps; parameters stay fp32."""
        for casts in self._kept:
            casts.num_holders -= 1
            if casts.num_holders <= 0:
                casts.detach()
        self._kept.clear()


def keep_fp32(model: nn.Module, patterns: str | Iterable[str] = (), *, norms: bool = True) -> Fp32Modules:
    """Keep modules in fp32; call it after `model.half()` and before building an optimizer.

    Args:
        model: fp32 or half; half-precision parameters of the modules become fp32.
        patterns: one or several shell-style patterns of further modules, by name (`"*.router"`) or class
            name.
        norms: whether to keep layer, RMS and group norms: torch's, and classes with such names.

    Returns:
        The modules' names, and a method to undo the call.

    Raises:
        UserError: a pattern matches nothing or is not a string, there is no norm, or torch has sharded the
            model; then nothing has changed. Later, a forward raises it if a module was converted to half
            precision.
    """
    require_module(model, "keep_fp32")
    refuse_sharded_model(
        "keep_fp32",
        model,
        "leave it out, and give modules to fully_shard with a policy of fp32",
    )
    wanted = _as_patterns(patterns)
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
    # A module inside another one would cast back too early; the outer module covers it.
    outer = {name: module for name, module in found.items() if not _is_within(name, found)}
    return Fp32Modules(outer)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer, RMS or group norm, by its class or the class's name."""
    if isinstance(module, NORM_CLASSES):
        return True
    name = type(module).__name__
    return any(fnmatchcase(name, pattern) for pattern in NORM_CLASS_NAMES)


def is_kept_fp32(parameter: Tensor) -> bool:
    """Whether a parameter is marked to stay fp32."""
    return bool(getattr(parameter, "keep_fp32", 0))


class _Casts:
    """The hooks of one module, with a stack, because a module may be called again inside its own forward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.num_holders = 0  # `Fp32Modules` that keep this module
        self._name = name
        self._module = module
        self._entered: list[tuple[torch.dtype | None, str | None]] = []
        for parameter in module.parameters():
            if parameter.dtype in HALF_DTYPES:
                parameter.data = parameter.data.float()
            _mark(parameter, 1)
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Casts:
        """Copy the hooks with the module, and mark the copied parameters, which lose their attributes."""
        copied = memo[id(self)] = object.__new__(_Casts)
        copied.num_holders = 0  # no call of `keep_fp32` on the copy yet
        copied._name, copied._entered = self._name, []
        copied._module = copy.deepcopy(self._module, memo)
        copied._handles = copy.deepcopy(self._handles, memo)
        for parameter in self._module.parameters():
            _mark(copy.deepcopy(parameter, memo), 1)
        return copied

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._module.parameters():
            _mark(parameter, -1)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for parameter in module.parameters():
            if parameter.dtype in HALF_DTYPES:
                raise UserError(
                    f"module {self._name!r} is kept in fp32, but its parameters are now "
                    f"{_short(parameter.dtype)}: call .half() or .bfloat16() before keep_fp32, not after; "
                    "with fully_shard and a MixedPrecisionPolicy, leave it out"
                )
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        device_type = tensors[0].device.type if tensors else "cpu"
        switched_off = device_type if torch.is_autocast_enabled(device_type) else None
        if switched_off is not None:
            # torch.compile does not support a torch.autocast entered in one hook and left in another
            torch.set_autocast_enabled(device_type, False)
        self._entered.append((tensors[0].dtype if tensors else None, switched_off))
        return tuple(_widened(x) for x in args), {name: _widened(x) for name, x in kwargs.items()}

    def leave(self, _: nn.Module, __: object, output: Any) -> Any:
        if not self._entered:
            return None  # another hook failed before `enter` ran
        dtype, switched_off = self._entered.pop()
        if switched_off is not None:
            torch.set_autocast_enabled(switched_off, True)
        return _narrowed(output, dtype) if dtype in HALF_DTYPES else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _casts_of(module: nn.Module) -> _Casts | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _Casts)), None)


def _mark(parameter: Any, change: int) -> None:
    """Count the kept modules that contain `parameter`; tied parameters may be in several."""
    count = getattr(parameter, "keep_fp32", 0) + change
    if count > 0:
        parameter.keep_fp32 = count
    elif hasattr(parameter, "keep_fp32"):
        del parameter.keep_fp32


def _as_patterns(patterns: Any) -> tuple[str, ...]:
    given: tuple[Any, ...] = (patterns,)
    if isinstance(patterns, Iterable) and not isinstance(patterns, str):
        given = tuple(patterns)
    if not all(isinstance(each, str) for each in given):
        raise UserError(
            f"patterns = {shown(patterns)} for fp32 modules is not valid: pass names of modules or classes, "
            'such as ["*.router"], or leave it out'
        )
    return given


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
