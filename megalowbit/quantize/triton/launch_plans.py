"""Launches a kernel that Triton has compiled before without Triton's binder, which takes most of a launch.

Triton binds arguments, specialises them, formats a key, and checks globals at every launch. Here the first
launch of a specialisation is Triton's; its compiled kernel is kept under a key that is as fine as Triton's:
constants with their types, dtypes, whether pointers and integers are divisible by 16, integers that are 1,
widths of integers, and the device. Later launches call the compiled kernel's own launcher with the same grid,
stream and arguments. Options are the same for all launches.

This relies on Triton's internals. It is done only for NVIDIA GPUs and versions in `CHECKED`, and only if the
functions that it replaces read what they read in those versions. While hooks of a profiler are set, or
Triton's debug or instrumentation options, launches are Triton's. Triton's check that globals of a kernel have
not changed is left out. The interpreter is not affected.
"""

from __future__ import annotations

import functools
import inspect
import logging
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CHECKED = ("3.9",)
OPTIONS = {"enable_fp_fusion": False}  # products and sums are rounded as written
MOST_PLANS = 1024  # of a kernel
ATTRIBUTE = "megalowbit_plans"  # of a kernel: its plans
# what Triton's launch reads; with other names, it does something else
RUN_NAMES = frozenset(
    (
        "debug", "knobs", "runtime", "compilation", "instrumentation_mode", "fpsan_homomorphic_casts",
        "driver", "active", "get_current_device", "get_current_stream", "pre_run_hooks", "device_caches",
        "add_stages_inspection_hook", "append", "compute_cache_key", "get", "_pack_args", "_do_compile",
        "object", "used_global_vals", "items", "RuntimeError", "callable", "len", "launch_metadata", "run",
        "function", "packed_metadata", "launch_enter_hook", "launch_exit_hook", "values",
    )
)  # fmt: skip
LAUNCHER_PARAMETERS = (
    "self", "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata",
    "launch_enter_hook", "launch_exit_hook", "args",
)  # fmt: skip
WORDS = 2**31
logger = logging.getLogger("megalowbit")


class KernelPlans:
    """The compiled versions of one kernel on the active driver."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.driver: Any = None
        self.is_bypassed = False
        self.compiled: dict[tuple[Any, ...], Any] = {}
        if not isinstance(kernel, JITFunction):  # interpreted
            return
        self._values_of = itemgetter(*kernel.arg_names)
        constants = [each.num for each in kernel.params if each.is_constexpr]
        self._constants_of = itemgetter(*constants, constants[0])  # at least two, so that it returns a tuple
        self._specialised = tuple(
            (each.num, not each.do_not_specialize) for each in kernel.params if not each.is_constexpr
        )

    def launch(self, programs: int, arguments: dict[str, Any]) -> None:
        """Launch on the current device and stream."""
        if not isinstance(self.kernel, JITFunction):
            self.kernel[(programs,)](**arguments)
            return
        active = driver.active
        if active is not self.driver:
            self.driver, self.compiled, self.is_bypassed = active, {}, _may_bypass(active)
        if not self.is_bypassed or is_observed() or self.kernel.pre_run_hooks:
            self.kernel[(programs,)](**arguments, **OPTIONS)
            return
        values, device = self._values_of(arguments), active.get_current_device()
        key = self.key(values, device)
        compiled = None if key is None else self.compiled.get(key)
        if compiled is not None and len(arguments) == len(values):
            compiled.run(
                programs,
                1,
                1,
                active.get_current_stream(device),
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *values,
            )
            return
        made = self.kernel[(programs,)](**arguments, **OPTIONS)
        if key is not None and type(made) is triton.compiler.CompiledKernel:
            if len(self.compiled) >= MOST_PLANS:
                self.compiled.clear()
            self.compiled[key] = made

    def key(self, values: tuple[Any, ...], device: int) -> tuple[Any, ...] | None:
        """All that a compiled version depends on; `None` if it has an argument of another kind.

        Args:
            values: arguments in the kernel's order.
            device: index of the GPU.
        """
        constants = self._constants_of(values)
        key: list[Any] = [device, constants, tuple(map(type, constants))]
        for index, is_specialised in self._specialised:
            value = values[index]
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                key.append(value.dtype)
                key.append(not value.data_ptr() & 15)
            elif kind is int:
                width = 32 if -WORDS <= value < WORDS else 64 if value < 2**63 else 65  # 65: unsigned
                if is_specialised:
                    width = 1 if value == 1 else width if value & 15 else -width
                key.append(width)
            elif value is None or kind is float:
                key.append(kind)
            else:
                return None
        return tuple(key)


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
    return bool(
        _has_calls(runtime.launch_enter_hook)
        or _has_calls(runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook is not None
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def _has_calls(hook: Any) -> bool:
    return hook is not None and (type(hook) is not knobs.HookChain or bool(hook.calls))


@functools.lru_cache(maxsize=8)
def _may_bypass(active: Any) -> bool:
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
    names = frozenset(JITFunction.run.__code__.co_names)
    if names != RUN_NAMES:
        changed = ", ".join(sorted(names ^ RUN_NAMES)[:3])
        return f"JITFunction.run of Triton {version} reads other names than expected ({changed}, …)"
    from triton.backends.nvidia.driver import CudaLauncher

    found = tuple(inspect.signature(CudaLauncher.__call__).parameters)
    if found != LAUNCHER_PARAMETERS:
        return f"CudaLauncher of Triton {version} takes other parameters ({', '.join(found)})"
    missing = [
        each for each in ("run", "launch_metadata") if not hasattr(triton.compiler.CompiledKernel, each)
    ]
    return f"CompiledKernel of Triton {version} has no {missing[0]}" if missing else None


def launch(kernel: Any, programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
    """Run a kernel on a device, which becomes the current one meanwhile."""
    plans = plans_of(kernel)
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            plans.launch(programs, arguments)
    else:
        plans.launch(programs, arguments)
