"""Autocast by operation classes (`op_classes`): a context for a block of code, hooks for a whole model.

torch.autocast has its own lists, which differ by device: softmax, norms and sums are fp32 on CUDA but stay in
half precision on a CPU. Here torch.autocast casts the products and keeps the cast weights. A torch function
mode casts everything else, with one table for every device. The mode acts only while torch.autocast is
enabled, so `torch.autocast(..., enabled=False)` disables both, and the innermost context decides.

Activation checkpointing recomputes a block later, outside the context. torch then restores its autocast, but
not the mode. `attach_autocast` therefore enters the mode again at every module. A checkpointed function that
is not a module needs `context_fn=contexts_for_checkpoint(classes, device_type)`. A compiled model gets the
same casts.

Not covered: operations inside torch's composite functions (`multi_head_attention_forward` with weights), and
in-place operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.optim.precision.op_classes import FLOAT16, KNOWN, OpClasses
from megalowbit.values import require_module

Classes = OpClasses | Mapping[str, Iterable[str]]
HALF = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})
# torch.autocast casts these on CPU and CUDA, and keeps the cast weight for its next use
CAST_BY_TORCH = frozenset(FLOAT16) - {"mv", "addmv", "addr", "chain_matmul", "multi_dot", "einsum"}
# names of functions in torch that differ from the name in the table
ALIASES = MappingProxyType(
    {
        "__matmul__": "matmul",
        "__rmatmul__": "matmul",
        "__pow__": "pow",
        "__rpow__": "pow",
        "__rsub__": "sub",
        "subtract": "sub",
        "multiply": "mul",
        "__rdiv__": "div",
        "divide": "div",
        "true_divide": "div",
        "concat": "cat",
        "concatenate": "cat",
        "row_stack": "vstack",
        "arctan2": "atan2",
        "arccos": "acos",
        "arcsin": "asin",
        "log_sigmoid": "logsigmoid",
        "linalg_multi_dot": "multi_dot",
        "linalg_norm": "norm",
        "linalg_vector_norm": "norm",
        "linalg_matrix_norm": "norm",
        "linalg_cross": "cross",
        "special_softmax": "softmax",
        "special_log_softmax": "log_softmax",
        "special_logsumexp": "logsumexp",
        "special_exp2": "exp2",
        "special_expm1": "expm1",
        "special_log1p": "log1p",
        "special_erfinv": "erfinv",
    }
)


@contextmanager
def autocast(
    precision: str, device_type: str | torch.device, classes: Classes | None = None
) -> Iterator[None]:
    """Run operations in the precision of their class.

    Args:
        precision: "fp16" or "bf16"; the dtype of `classes.float16`.
        device_type: of the tensors, such as `tensor.device`; tensors on other devices are not cast.
        classes: default: `OpClasses.default()`; `{"float32": ["gelu"]}` moves some, see `OpClasses.given`.

    Raises:
        UserError: another precision, a device without autocast, invalid classes.
    """
    kind = device_kind(device_type)
    mode = _OpClassMode(classes, kind)
    with torch.autocast(kind, dtype=half_dtype(precision)), mode:
        yield


def contexts_for_checkpoint(
    classes: Classes | None, device_type: str | torch.device
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` for a function called within `autocast`.

    Raises:
        UserError: see `autocast`.
    """
    given, kind = OpClasses.given(classes), device_kind(device_type)
    return lambda: (nullcontext(), _OpClassMode(given, kind))


def half_dtype(precision: str) -> torch.dtype:
    """The dtype of a precision's name.

    Raises:
        UserError: it is neither "fp16" nor "bf16".
    """
    if not isinstance(precision, str) or precision not in HALF:
        raise unknown_name("precision for autocast", precision, HALF)
    return HALF[precision]


def device_kind(device_type: str | torch.device) -> str:
    """The device type for torch.autocast: "cuda" for `torch.device("cuda:1")`.

    Raises:
        UserError: torch.autocast does not support it.
    """
    try:
        kind = torch.device(device_type).type
        if torch.amp.is_autocast_available(kind):
            return kind
    except (RuntimeError, TypeError):
        pass  # torch's own message lists all device types that exist
    raise UserError(
        f'device_type = {shown(device_type)} for autocast is not valid: pass "cpu", "cuda" or tensor.device'
    )


class ModelAutocast:
    """Autocast at each forward of a model, including evaluation and recomputation; see `attach_autocast`."""

    def __init__(self, model: nn.Module, precision: str, device_type: str, classes: Classes | None) -> None:
        self._dtype = half_dtype(precision)
        self._device_type = device_type
        self._model = model
        self._mode = _OpClassMode(classes, device_type)
        self._entered: list[tuple[nn.Module, list[AbstractContextManager[Any]]]] = []
        self._handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, _: object) -> None:
        contexts: list[AbstractContextManager[Any]] = []
        if module is self._model:
            contexts.append(torch.autocast(self._device_type, dtype=self._dtype))
        if not self._entered:
            # Inside the model this is a recomputation, for which torch has already restored autocast.
            contexts.append(self._mode)
        for context in contexts:
            context.__enter__()
        self._entered.append((module, contexts))

    def _leave(self, module: nn.Module, *_: object) -> None:
        if not self._entered or self._entered[-1][0] is not module:
            return  # another hook failed before this one ran
        for context in reversed(self._entered.pop()[1]):
            context.__exit__(None, None, None)


def attach_autocast(
    model: nn.Module,
    precision: str,
    device_type: str | torch.device,
    classes: Classes | None = None,
) -> ModelAutocast:
    """Run every forward of `model` under `autocast`; modules that are added later are not covered.

    Args:
        model: its forward enables autocast; calling one of its parts alone does not.
        precision: "fp16" or "bf16".
        device_type: of the model when it runs.
        classes: see `autocast`.

    Raises:
        UserError: see `autocast`.
    """
    require_module(model, "attach_autocast")
    return ModelAutocast(model, precision, device_kind(device_type), classes)


class _OpClassMode(TorchFunctionMode):
    """Casts the arguments of each called function, by the function's name."""

    def __init__(self, classes: Classes | None, device_type: str) -> None:
        super().__init__()
        table = OpClasses.given(classes).class_of_each()
        names = {**{op: op for op in KNOWN}, **ALIASES}
        self._class_of = {
            called: table.get(op, "as_given")
            for called, op in names.items()
            if not (op in CAST_BY_TORCH and table.get(op) == "float16")
        }
        self._device_type = device_type
        self._inner = 0  # number of contexts entered inside this one, which override it
        self._outer: list[list[_OpClassMode]] = []

    def __enter__(self) -> _OpClassMode:
        outer = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _OpClassMode)]
        for mode in outer:
            mode._inner += 1
        self._outer.append(outer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for mode in self._outer.pop():
            mode._inner -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = self._class_of.get(getattr(func, "__name__", ""))
        device_type = self._device_type
        if found is None or self._inner or not torch.is_autocast_enabled(device_type):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None or kwargs.get("dtype") is not None or _names_a_dtype(args):
            return func(*args, **kwargs)
        if found == "promote":
            args, kwargs = _promoted((args, kwargs))
        elif found != "as_given":
            dtype = torch.float32 if found == "float32" else torch.get_autocast_dtype(device_type)
            args, kwargs = self._cast(args, dtype), self._cast(kwargs, dtype)
        # disabled for the call, because torch.autocast would cast again by its own list
        if torch.compiler.is_compiling():  # the compiler supports contexts only, which are slower otherwise
            with torch.autocast(device_type, enabled=False):
                return func(*args, **kwargs)
        torch.set_autocast_enabled(device_type, False)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            # fp64 is chosen explicitly, and torch.autocast does not cast it either
            is_ours = tensor.is_floating_point() and tensor.device.type == self._device_type
            return tensor.to(dtype) if is_ours and tensor.dtype != torch.float64 else tensor

        return _mapped(value, cast)


def _promoted(value: Any) -> Any:
    """Cast all floating-point tensors with at least one axis to the widest of their types."""
    found: set[torch.dtype] = set()

    def is_counted(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() > 0

    def note(tensor: Tensor) -> Tensor:
        if is_counted(tensor):
            found.add(tensor.dtype)
        return tensor

    _mapped(value, note)
    if len(found) < 2:
        return value
    widest = reduce(torch.promote_types, found)
    return _mapped(value, lambda tensor: tensor.to(widest) if is_counted(tensor) else tensor)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to each tensor in arguments, lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(each, function) for name, each in value.items()}
    return value


def _names_a_dtype(args: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.dtype) for value in args)
