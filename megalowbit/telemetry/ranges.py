"""Named ranges of time by phase and by layer: on PyTorch's profiler's timeline, and NVTX ranges for Nsight.

`LayerRanges` adds hooks to a model's modules, and `remove` removes them; without them nothing is recorded.
Forward ranges are one for each block and for each module with parameters. Backward ranges are one for each
block, which begins when the gradient of the block's output is known and ends when that of its input is, and
one for each custom autograd function, such as a low-bit layer's. Recomputed activations are forward ranges
inside backward ranges. Hooks only read: results do not change.
Not covered: layers in graphs that `torch.compile` has captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction


@contextmanager
def time_range(name: str) -> Iterator[None]:
    """A named range of this thread, on the profiler's timeline and, with a GPU, as NVTX range."""
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


class LayerRanges:
    """Ranges of a model's modules until `remove` is called.

    Args:
        blocks: the blocks, by the names of their ranges.
        layers: other modules, by the names of their ranges.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> None:
        self._forward: list[AbstractContextManager[None]] = []  # open ranges, outermost first
        self._layer_backward: list[AbstractContextManager[None]] = []
        self._backward: tuple[str, AbstractContextManager[None]] | None = None  # of a block
        self._handles: list[Any] = []
        for name, module in {**blocks, **layers}.items():
            self._add(name, module, is_block=name in blocks)

    def remove(self) -> None:
        """Remove the hooks, and end a range that no gradient has ended, as of blocks below frozen ones."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._backward is not None:
            self._end_backward(self._backward[0])

    def _add(self, name: str, module: nn.Module, *, is_block: bool) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if is_block and isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self._end_backward(name))
            self._forward.append(_entered(f"{name} forward"))

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._forward.pop().__exit__(None, None, None)
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor) or not first.requires_grad:
                return
            if is_block:
                first.register_hook(lambda _: self._begin_backward(name))
            elif isinstance(first.grad_fn, BackwardCFunction):
                first.grad_fn.register_prehook(self._before_layer(name))
                first.grad_fn.register_hook(self._after_layer)

        self._handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            # also when recomputation ends early, which it does by raising an exception
            module.register_forward_hook(leave, always_call=True),
        ]

    def _begin_backward(self, name: str) -> None:
        if self._backward is not None:
            self._end_backward(self._backward[0])
        self._backward = (name, _entered(f"{name} backward"))

    def _end_backward(self, name: str) -> None:
        if self._backward is not None and self._backward[0] == name:
            self._backward[1].__exit__(None, None, None)
            self._backward = None

    def _before_layer(self, name: str) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            self._layer_backward.append(_entered(f"{name} backward"))

        return enter

    def _after_layer(self, _: Any, __: Any) -> None:
        self._layer_backward.pop().__exit__(None, None, None)


def _entered(name: str) -> AbstractContextManager[None]:
    found = time_range(name)
    found.__enter__()
    return found
