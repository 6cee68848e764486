"""What a launcher of Triton kernels keeps from step to step, and the dtypes that kernels know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def as_stored(values: Tensor) -> Tensor:
    """The tensor as passed to kernels: bf16 and FP8 as integers."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16)
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


class FixedArguments:
    """Arguments of a kernel that no tensor's address decides; a launcher keeps them.

    Attributes:
        values: by name.
        programs: how many are launched.
        words: names of the tensors that the kernel takes as int32.
        plans: what `launch_plans` finds for them, by the types of the other arguments.
    """

    def __init__(self, values: dict[str, Any], programs: int, words: tuple[str, ...] = ()) -> None:
        self.values, self.programs, self.words = values, programs, words
        self.plans: dict[tuple[type, ...], Any] = {}

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments, tensors in the dtypes of the kernel."""
        return {**self.values, **{name: self._stored(name, value) for name, value in given.items()}}

    def _stored(self, name: str, value: Any) -> Any:
        if name in self.words:
            return value.view(torch.int32)
        return as_stored(value) if isinstance(value, Tensor) else value
