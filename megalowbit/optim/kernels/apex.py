"""Adam on GPUs with the kernels of NVIDIA's apex: one launch unscales, skips or steps, and writes half
weights.

They are used only if the variable `MEGALOWBIT_APEX` is 1, because they have never run on a machine with apex,
and round differently from torch. The package named `apex` on PyPI is another one, so NVIDIA's is recognised
by `apex.multi_tensor_apply` and its compiled `amp_C`. The kernels take one step count for a list of tensors,
but torch's state has one for each tensor; `TensorLists` groups tensors of equal count.

Tested only with a stand-in that does what `amp_C` documents. A run that switches between apex and torch is
not bitwise reproducible.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from megalowbit.errors import UserError, shown
from megalowbit.optim.kernels.cpu import AdamSettings, AdamTensors

VARIABLE = "MEGALOWBIT_APEX"
L2, DECOUPLED = 0, 1  # values of the kernels' argument `mode`
Launch = Callable[..., object]


def is_available(device: torch.device) -> bool:
    """Whether the kernels are to be launched on a device.

    Raises:
        UserError: `MEGALOWBIT_APEX` asks for them and they are not installed, or it has another value.
    """
    if not _is_requested() or device.type != "cuda":
        return False
    if _library() is None:
        raise UserError(
            f"{VARIABLE}=1, but NVIDIA's apex with its kernels (amp_C) cannot be imported: install it from "
            "github.com/NVIDIA/apex (the package `apex` on PyPI is another one), or unset the variable"
        )
    return True


def _is_requested() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{VARIABLE}={shown(value)} must be 1 to use NVIDIA's apex, or 0")
    return value == "1"


class TensorLists:
    """Lists of parameters with the same settings and the same step count.

    Parameters that step together keep equal counts. Therefore the host reads the counts only at the first
    step and when other parameters or a loaded state take part.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []  # kept, so no other tensor can get the id of one of them
        self._counts: list[float] = []

    def of(self, items: Sequence[AdamTensors]) -> list[list[AdamTensors]]:
        """The items, grouped into lists."""
        steps = [item.step for item in items]
        if list(map(id, steps)) != list(map(id, self._steps)):
            self._steps, self._counts = steps, torch.stack(steps).tolist()
        lists: dict[tuple[AdamSettings, float], list[AdamTensors]] = defaultdict(list)
        for item, count in zip(items, self._counts, strict=True):
            lists[item.settings, count].append(item)
        return list(lists.values())


def adam_step(lists: Sequence[Sequence[AdamTensors]], grad_scale: Tensor, found_inf: Tensor) -> None:
    """Take one step of Adam on gradients ÷ `grad_scale`, or change nothing if `found_inf` is 1.

    Like `kernels.cpu.adam_step`, with lists from `TensorLists`; gradients are overwritten.
    """
    flag = found_inf.reshape(1).to(torch.int32)
    inverse = grad_scale.reshape(1).reciprocal()
    for together in lists:
        by_dtype: dict[tuple[torch.dtype, ...], list[AdamTensors]] = defaultdict(list)
        for item in together:
            by_dtype[item.gradient.dtype, item.master.dtype if item.half is None else item.half.dtype].append(
                item
            )
        next_step = (together[0].step + 1).reshape(1).to(torch.int32)
        for items in by_dtype.values():
            _launch(items, flag, inverse, next_step)
        torch._foreach_add_([item.step for item in together], 1 - found_inf)


def _launch(items: Sequence[AdamTensors], flag: Tensor, inverse: Tensor, next_step: Tensor) -> None:
    """Launch the kernel for tensors of the same dtypes."""
    library, settings = _library(), items[0].settings
    assert library is not None, "no apex"
    apply, amp_c = library
    arguments = (
        torch.full((1,), settings.learning_rate, dtype=torch.float32, device=flag.device),
        settings.beta1,
        settings.beta2,
        settings.epsilon,
        next_step,
        DECOUPLED if settings.is_decoupled else L2,
        1,  # with bias correction
        settings.weight_decay,
        inverse,
    )
    gradients, masters = [item.gradient for item in items], [item.master for item in items]
    moments = [item.exp_avg for item in items], [item.exp_avg_sq for item in items]
    halves = [item.half for item in items if item.half is not None]
    if halves and gradients[0].dtype == halves[0].dtype:
        tensors = [gradients, halves, *moments, masters]
        apply(amp_c.multi_tensor_adam_capturable_master, flag, tensors, *arguments)
        return
    # This kernel needs gradients in the weights' dtype, which is fp32 here, because it steps the masters.
    if gradients[0].dtype != torch.float32:
        gradients = [gradient.float() for gradient in gradients]
    apply(amp_c.multi_tensor_adam_capturable, flag, [gradients, masters, *moments], *arguments)
    if halves:
        torch._foreach_copy_(halves, masters)


@functools.lru_cache(maxsize=1)
def _library() -> tuple[Launch, ModuleType] | None:
    try:
        import amp_C  # type: ignore[import-not-found]
        from apex.multi_tensor_apply import multi_tensor_applier
    except ImportError:
        return None
    has_kernels = hasattr(amp_C, "multi_tensor_adam_capturable_master")  # missing in old versions
    return (multi_tensor_applier, amp_C) if has_kernels else None
