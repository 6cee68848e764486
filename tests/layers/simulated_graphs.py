"""CUDA graphs without a GPU: operations of torch and launches of kernels on a CPU, recorded and repeated.

In a capture, results are computed so that the host's code can go on. Afterwards nothing that existed before
keeps a change, and what the capture made is 0, as on a GPU, where a capture runs nothing. A replay repeats
each operation with the arguments of the capture and writes into the memory of the captured results. A
number of the host is therefore a constant of the graph. The host must not read a result.

Kernels run in Triton's interpreter.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from benchmarks.kernels.launches import launching, name_of
from megalowbit import cuda_graphs
from megalowbit.quantize.triton import launch_arguments, step_counters

HOST_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select")
LONG = 2**64 - 1


def tensors_of(values):
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


class Device:
    """What runs: draws of kernels, and the graph that is being captured.

    Attributes:
        drawn: (key, micro-batch) of each kernel that draws, read where the kernel would read it.
        graph: while capturing.
        stream: handle of the current stream.
    """

    def __init__(self):
        self.drawn = []
        self.graph = None
        self.stream = 0
        self._captures = 0

    @contextmanager
    def active(self):
        run = launch_arguments.launch

        def launch(kernel, programs, device, **arguments):
            def again():
                with _disable_current_modes():
                    self._note(kernel, arguments)
                    run(kernel, programs, device, **arguments)

            if self.graph is not None:
                self.graph.add(again, arguments)
            else:
                again()

        with (
            launching(launch),
            patch.object(cuda_graphs, "is_capturing", lambda _device: self.graph is not None),
            patch.object(cuda_graphs, "_number", lambda _stream: self._captures),
            patch.object(cuda_graphs, "_stream", lambda _device: self.stream),
            patch.object(step_counters, "_stream", lambda _device: self.stream),
        ):
            yield self

    def _note(self, kernel, arguments):
        memory = arguments.get("step")
        if memory is None:
            return
        step, key = memory.tolist()
        low, high = (arguments[name] & 2**32 - 1 for name in ("key_low", "key_high"))
        self.drawn.append((name_of(kernel), (low | high << 32) ^ (key & LONG), step - arguments["lag"]))

    @contextmanager
    def capture(self, stream=1):
        self._captures += 1
        graph, former = Graph(), self.stream
        self.graph, self.stream = graph, stream
        try:
            with graph:
                yield graph
        finally:
            self.graph, self.stream = None, former
            graph.undo()
            self.drawn.clear()  # nothing has run

    def draws(self, run):
        """What a call draws."""
        self.drawn.clear()
        run()
        return list(self.drawn)


class Graph(TorchDispatchMode):
    """A captured graph."""

    def __init__(self):
        super().__init__()
        self._calls = []
        self._own = {}  # by address of the storage: made in the capture, kept as long as the graph
        self._before = {}  # by address: other storages, and a copy from before the capture

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in HOST_READS:
            raise RuntimeError(f"{func}: the host waits in a capture")
        schema = func._schema
        is_written = any(
            each.alias_info is not None and each.alias_info.is_write for each in schema.arguments
        )
        if is_written:
            self._save((args, kwargs))
        result = func(*args, **kwargs)
        is_alias = any(each.alias_info is not None for each in schema.returns)
        if is_written:
            self._calls.append(lambda: func(*args, **kwargs))
        elif not is_alias:
            made = tensors_of(result)
            self._own |= {each.untyped_storage().data_ptr(): each for each in made}

            def again():
                for each, new in zip(made, tensors_of(func(*args, **kwargs)), strict=True):
                    each.copy_(new)

            self._calls.append(again)
        return result

    def add(self, again, values):
        """A launch."""
        self._save(values)
        again()
        self._calls.append(again)

    def _save(self, values):
        with _disable_current_modes():
            for each in tensors_of(values):
                storage = each.untyped_storage()
                if storage.data_ptr() not in self._own and storage.data_ptr() not in self._before:
                    self._before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        for storage, copy in self._before.values():
            storage.copy_(copy)
        for each in self._own.values():
            each.untyped_storage().fill_(0)

    @torch.no_grad()
    def replay(self):
        for call in self._calls:
            call()
