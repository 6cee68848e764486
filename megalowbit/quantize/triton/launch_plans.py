"""Launches a kernel that Triton has compiled before without Triton's binder, which takes most of a launch.

Triton binds arguments, specialises them, formats a key, and checks globals at every launch. Here the first
launch of a specialisation is Triton's; its compiled kernel is kept under a key at least as fine as Triton's:
types of all arguments, constants, dtypes, whether pointers are divisible by 16, integers that Triton
specialises, widths of the others, and the device. Later launches call the compiled kernel's own launcher with
the same grid, stream and arguments. A launch with options of its own, such as `num_warps`, is Triton's.

This relies on Triton's internals. It is done only for NVIDIA GPUs and versions in `CHECKED`, and only if the
functions that it replaces read what they read in those versions; another `JITFunction.run` is looked at
again, and gets new plans. While hooks of a profiler are set, or Triton's debug or instrumentation options,
launches are Triton's. Triton's check that globals of a kernel have not changed is left out. The interpreter
is not affected.

A launcher that keeps what no tensor's address decides (`FixedArguments`) has a shorter way: the alignment of
the tensors finds the plan. The compiled kernel takes addresses, so tensors are passed in the dtype they have.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megalowbit.quantize.triton.fixed_arguments import FixedArguments

CHECKED = ("3.7", "3.8", "3.9")
OPTIONS = {"enable_fp_fusion": False}  # products and sums are rounded as written
MOST_PLANS = 1024  # of a kernel and types of its arguments
ATTRIBUTE = "megalowbit_plans"  # of a kernel: its plans
# what Triton's launch reads; with other names, it does something else
RUN_NAMES = frozenset(
    (
        "debug", "knobs", "runtime", "compilation", "instrumentation_mode",
        "driver", "active", "get_current_device", "get_current_stream", "pre_run_hooks", "device_caches",
        "add_stages_inspection_hook", "append", "compute_cache_key", "get", "_pack_args", "_do_compile",
        "object", "used_global_vals", "items", "RuntimeError", "callable", "len", "launch_metadata", "run",
        "function", "packed_metadata", "launch_enter_hook", "launch_exit_hook", "values",
    )
)  # fmt: skip
FROM_3_9 = frozenset(("fpsan_homomorphic_casts",))  # of a sanitiser, see `instrumentation_mode`
LAUNCHER_PARAMETERS = (
    "self", "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata",
    "launch_enter_hook", "launch_exit_hook", "args",
)  # fmt: skip
WORDS = 2**31
_ADDRESS, _LOW_BITS = Tensor.data_ptr, (15).__and__  # Triton distinguishes addresses divisible by 16
logger = logging.getLogger("megalowbit")


class Layout:
    """Where a kernel's tensors and numbers are, for arguments of certain types.

    Attributes:
        is_known: whether all arguments have types whose specialisation is known.
        compiled: compiled versions by what else they depend on.
    """

    def __init__(self, kernel: Any, types: tuple[type, ...]) -> None:
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.is_known = True
        tensors, specialized, free = [], [], []
        for parameter, kind in zip(kernel.params, types, strict=True):
            if kind in (Tensor, Parameter):
                tensors.append(parameter.num)
            elif parameter.is_constexpr or kind is float or (kind is int and not parameter.do_not_specialize):
                specialized.append(parameter.num)
            elif kind is int:
                free.append(parameter.num)
            elif kind is not type(None):
                self.is_known = False
        self._tensors, self._specialized, self._free = map(_getter, (tensors, specialized, free))

    def key(self, values: tuple[Any, ...], device: int) -> tuple[Any, ...]:
        """All that the compiled version depends on besides the types.

        Integers that Triton specialises are in it as they are, which is finer than Triton's classes.
        """
        tensors = self._tensors(values)
        return (
            device,
            self._specialized(values),
            tuple([each.dtype for each in tensors]),
            tuple([each.data_ptr() & 15 == 0 for each in tensors]),
            _number_types(self._free(values)),
        )


def _number_types(numbers: tuple[int, ...]) -> tuple[str, ...]:
    """Triton's types of numbers that it does not specialise."""
    return tuple(["i32" if -WORDS <= each < WORDS else "i64" if each < 2**63 else "u64" for each in numbers])


def _getter(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that returns a tuple of these entries."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1) if indices else slice(0))  # of one index: no tuple


class GivenArguments:
    """The arguments of certain types that come with each launch: which are tensors, which are numbers.

    Attributes:
        compiled: compiled versions by what else they depend on, and how all arguments get in their order.
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.tensors = _getter([at for at, kind in enumerate(kinds) if issubclass(kind, Tensor)])
        self.numbers = _getter([at for at, kind in enumerate(kinds) if kind is int])
        self.compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}


class KernelPlans:
    """The compiled versions of one kernel on the active driver."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.driver: Any = None
        self.run: Any = None  # `JITFunction.run` when the plans were made
        self.is_bypassed = False
        self.layouts: dict[tuple[type, ...], Layout] = {}
        self._is_compiled = isinstance(kernel, JITFunction)  # not interpreted
        if self._is_compiled:
            self._values_of = itemgetter(*kernel.arg_names)

    def launch_fixed(self, fixed: FixedArguments, given: dict[str, Any]) -> None:
        """Launch on the current device and stream, by the plan in `fixed` if there is one."""
        if not self._is_compiled:
            self.launch(fixed.programs, fixed.complete(given))
            return
        values, active = tuple(given.values()), driver.active
        device, kinds = active.get_current_device(), tuple(map(type, values))
        found = fixed.plans.get(kinds)
        if found is None:
            found = fixed.plans[kinds] = GivenArguments(kinds)
        numbers = found.numbers(values)
        # `_check_fixed`: numbers are not specialised. `max`, `min` and `map` in C are much faster than a loop
        is_i32 = not numbers or (max(numbers) < WORDS and min(numbers) >= -WORDS)  # in nearly every launch
        alignments = tuple(map(_LOW_BITS, map(_ADDRESS, found.tensors(values))))
        key = active, device, JITFunction.run, is_i32 or _number_types(numbers), alignments
        plan = found.compiled.get(key)
        if plan is None or is_observed() or self.kernel.pre_run_hooks:
            self._check_fixed(given)
            compiled = self.launch(fixed.programs, fixed.complete(given))
            if compiled is not None:
                found.compiled[key] = compiled, *self._order(fixed, given)
            return
        compiled, order, constants = plan
        _run(compiled, fixed.programs, active.get_current_stream(device), order(values + constants))

    def _check_fixed(self, given: dict[str, Any]) -> None:
        """Keys of fixed launches hold no values, so nothing is compiled for the value of what is given."""
        for parameter in self.kernel.params:
            value = given.get(parameter.name)
            is_free = type(value) is int and parameter.do_not_specialize
            if value is not None and not isinstance(value, Tensor) and not is_free:
                raise TypeError(
                    f"{self.kernel.__name__} is compiled for the value of {parameter.name} = {value!r}: "
                    "name it in do_not_specialize, or keep it in FixedArguments"
                )

    def _order(self, fixed: FixedArguments, given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """A function that puts given values and those kept in the kernel's order, and those kept."""
        names = [*given, *fixed.values]
        return itemgetter(*map(names.index, self.kernel.arg_names)), tuple(fixed.values.values())

    def launch(self, programs: int, arguments: dict[str, Any]) -> CompiledKernel | None:
        """Launch on the current device and stream.

        Returns:
            The compiled kernel if later launches of this kind by-pass Triton.
        """
        if not self._is_compiled:
            self.kernel[(programs,)](**arguments)
            return None
        active = driver.active
        if active is not self.driver or JITFunction.run is not self.run:
            self.driver, self.run, self.layouts = active, JITFunction.run, {}
            self.is_bypassed = _may_bypass(active, self.run)
        if not self.is_bypassed or is_observed() or self.kernel.pre_run_hooks:
            self.kernel[(programs,)](**arguments, **OPTIONS)
            return None
        values, device = self._values_of(arguments), active.get_current_device()
        layout = self.layout(values)
        key = layout.key(values, device)
        has_options = len(arguments) != len(values)  # such as `num_warps`, which keys do not have
        compiled = None if has_options else layout.compiled.get(key)
        if compiled is None:
            compiled = self.kernel[(programs,)](**arguments, **OPTIONS)
            if layout.is_known and not has_options and type(compiled) is CompiledKernel:
                if len(layout.compiled) >= MOST_PLANS:
                    layout.compiled.clear()
                layout.compiled[key] = compiled
            return None
        _run(compiled, programs, active.get_current_stream(device), values)
        return compiled

    def layout(self, values: tuple[Any, ...]) -> Layout:
        """The layout of arguments in the kernel's order."""
        types = tuple(map(type, values))
        found = self.layouts.get(types)
        if found is None:
            found = self.layouts[types] = Layout(self.kernel, types)
        return found


def _run(compiled: Any, programs: int, stream: int, values: Sequence[Any]) -> None:
    """Call the compiled kernel's own launcher; the three are metadata and hooks, of which there are none."""
    metadata = compiled.packed_metadata
    compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *values)


def plans_of(kernel: Any) -> KernelPlans:
    """The plans of a kernel, kept with it: a look-up by the kernel itself would hash its source."""
    found: KernelPlans | None = kernel.__dict__.get(ATTRIBUTE)
    if found is None:
        found = KernelPlans(kernel)
        setattr(kernel, ATTRIBUTE, found)
    return found


def is_observed() -> bool:
    """Whether something is set that must see each launch, or that changes what is compiled."""
    runtime = knobs.runtime
    if runtime.add_stages_inspection_hook is not None or runtime.debug:
        return True
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and (type(hook) is not knobs.HookChain or hook.calls):
            return True
    return bool(knobs.compilation.instrumentation_mode)


@functools.lru_cache(maxsize=8)
def _may_bypass(active: Any, _run: Any) -> bool:
    """Whether plans may be used on this driver, with this `JITFunction.run`."""
    reason = why_not_bypassed(active)
    if reason is not None:
        logger.info("kernels are launched by Triton's own launcher, which takes longer: %s", reason)
    return reason is None


def why_not_bypassed(active: Any) -> str | None:
    """Why launches on this driver are left to Triton, in a clause; `None` if they are not."""
    version = triton.__version__
    if ".".join(version.split(".")[:2]) not in CHECKED:
        return f"the internals of Triton {version} were not checked, only those of {', '.join(CHECKED)}"
    backend = active.get_current_target().backend
    if backend != "cuda":
        return f"that was not checked on {backend}"
    names = frozenset(JITFunction.run.__code__.co_names) - FROM_3_9
    if names != RUN_NAMES:
        changed = ", ".join(sorted(names ^ RUN_NAMES)[:3])
        return f"JITFunction.run of Triton {version} reads other names than expected ({changed}, …)"
    from triton.backends.nvidia.driver import CudaLauncher

    found = tuple(inspect.signature(CudaLauncher.__call__).parameters)
    if found != LAUNCHER_PARAMETERS:
        return f"CudaLauncher of Triton {version} takes other parameters ({', '.join(found)})"
    missing = [each for each in ("run", "launch_metadata") if not hasattr(CompiledKernel, each)]
    return f"CompiledKernel of Triton {version} has no {missing[0]}" if missing else None


def launch(kernel: Any, programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
    """Run a kernel on a device, which becomes the current one meanwhile."""
    plans = plans_of(kernel)
    if _is_current(device):
        plans.launch(programs, arguments)
    else:
        with torch.cuda.device(device):
            plans.launch(programs, arguments)


def launch_fixed(kernel: Any, device: torch.device, fixed: FixedArguments, given: dict[str, Any]) -> None:
    """As `launch`, with what is kept and what is not."""
    plans = plans_of(kernel)
    if _is_current(device):
        plans.launch_fixed(fixed, given)
    else:
        with torch.cuda.device(device):
            plans.launch_fixed(fixed, given)


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.current_device() == device.index
