"""Counts what a layer launches on a GPU that is not there: kernels, bytes moved, operations of products.

Tensors of `AbsentGpu` have a shape, a dtype and the device "cuda", but no numbers. The code that runs is that
of a GPU with Triton: each operation of torch and each launch of a Triton kernel is recorded where it would
start. A tensor counts as moved once for each kernel that takes or returns it, whatever the caches hold.

An operation of torch is one kernel unless `KERNELS` says otherwise. A read by the host is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.kernels.launches import launching, name_of
from megalowbit import cuda_graphs
from megalowbit.quantize import backends
from megalowbit.quantize.triton import step_counters

GPU = torch.device("cuda", 0)
HOST_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select")
NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "scalar_tensor")
KERNELS = {  # operations of several kernels; those of cuSOLVER and of a sort are what its source launches
    "linalg_cholesky_ex": 4,  # column-major copy, factorisation, its outcome, zeros above the diagonal
    "linalg_solve_triangular": 3,  # two copies, solution
    "sort": 3,  # numbers of the elements, copy, sort
}
DEPENDENT = {"factors.transform_kernel": 15e-6}  # one program of 64 steps, each of which waits for the last
FP8_PRODUCT = "_scaled_mm"
PRODUCTS = ("mm", "addmm", "addmm_", FP8_PRODUCT)
IDLE = ("fp8.product_kernel",)  # it ends at once if the FP8 product before it was exact, as here


class Kernel(NamedTuple):
    """Kernels that one operation launches: how many, the bytes they move, and operations of a product."""

    name: str
    launches: int
    bytes: int
    flops: int


class Prediction(NamedTuple):
    """What a time is made of; defaults are an H200's. Nothing of it was measured.

    Attributes:
        bandwidth: bytes a second that a kernel reaches.
        speed: operations a second of a bf16 product.
        fp8_speed: the same of an FP8 product.
        shortest: seconds from the start of a small kernel to the start of the next.
    """

    bandwidth: float = 0.85 * 4.8e12
    speed: float = 0.75 * 989e12
    fp8_speed: float = 0.75 * 1979e12
    shortest: float = 4e-6

    def seconds(self, kernels: list[Kernel]) -> float:
        """Time of kernels one after the other: each as long as its bytes, its operations, or the shortest.

        `DEPENDENT` kernels take longer: seconds estimated from their compiled instructions.
        """
        return sum(
            max(
                each.bytes / self.bandwidth,
                each.flops / (self.fp8_speed if each.name == FP8_PRODUCT else self.speed),
                each.launches * self.shortest,
                DEPENDENT.get(each.name, 0.0),
            )
            for each in kernels
        )


class AbsentTensor(Tensor):
    """A tensor on the GPU that is not there; `meta` has its shape, strides and dtype."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=GPU
        )
        made.meta = meta
        return made

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """As torch's, which first asks the device's driver."""
        is_stored_so = self.is_contiguous(memory_format=memory_format)
        return self if is_stored_so else self.clone(memory_format=memory_format)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of `AbsentGpu`")


class AbsentGpu(TorchDispatchMode):
    """While active, operations on "cuda" return tensors without numbers and are recorded.

    Attributes:
        kernels: what is launched.
        calls: name and arguments of each operation and launch, with the dtypes of tensors in their place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.calls: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_flatten((args, kwargs or {}))[0]
        if not any(isinstance(each, AbsentTensor) or _is_gpu(each) for each in given):
            return func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in HOST_READS:
            raise RuntimeError(f"{func} makes the host wait")
        self.calls.append((func.overloadpacket.__name__, *map(_described, given)))
        meta_args, meta_kwargs = tree_map(_without_gpu, (args, kwargs or {}))
        result = func(*meta_args, **meta_kwargs)
        flat_result = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        read = tree_flatten((args, {key: each for key, each in (kwargs or {}).items() if key != "out"}))[0]
        self._record(func, [each.meta for each in read if isinstance(each, AbsentTensor)], flat_result)
        own = {id(each.meta): each for each in given if isinstance(each, AbsentTensor)}  # in place, or `out`

        def wrapped(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return own[id(each)] if id(each) in own else AbsentTensor(each)

        return tree_map(wrapped, result)

    def launch(self, kernel: Any, programs: int, _device: torch.device, **arguments: Any) -> None:
        """Record a launch of a Triton kernel in its place."""
        described = {name: _described(value) for name, value in arguments.items()}
        self.calls.append((name_of(kernel), programs, *sorted(described.items())))
        name = name_of(kernel)
        tensors = [each for each in arguments.values() if isinstance(each, Tensor) and name not in IDLE]
        self.kernels.append(Kernel(name, 1, sum(map(_bytes, tensors)), 0))

    def _record(self, func: Any, given: list[Tensor], returned: list[Tensor]) -> None:
        name, alias = func.overloadpacket.__name__, [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in alias)
        if is_view or name in NOTHING:
            return
        if name.startswith("new_") or name.endswith("_like"):
            given = []  # it has only the shape and dtype
        flops, launches = 0, KERNELS.get(name, 1)
        moved = sum(map(_bytes, given)) + sum(map(_bytes, returned))
        if name in PRODUCTS:
            left, right = given[1:3] if name.startswith("addmm") else given[:2]
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
            is_copied = name == "addmm" and returned[0] is not given[0] and given[0].ndim == 2
            if is_copied:  # the result starts as a copy of the matrix that the product is added to
                launches, moved = 2, moved + 2 * _bytes(given[0])
        self.kernels.append(Kernel(name, launches, moved, flops))


def _described(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else value


def _is_gpu(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _without_gpu(value: Any) -> Any:
    if isinstance(value, AbsentTensor):
        return value.meta
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return value.to("meta")
    return torch.device("meta") if _is_gpu(value) else value


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


@contextmanager
def counting(*, capture: int | None = None, gpu: AbsentGpu | None = None) -> Iterator[AbsentGpu]:
    """What runs inside runs on the GPU that is not there, and is recorded.

    With `capture`, a CUDA graph is being captured, as far as torch says, and this is the capture's number.
    """
    gpu = AbsentGpu() if gpu is None else gpu
    with ExitStack() as stack:
        # a GPU with Triton, whose tensors are plain memory
        stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(
            patch.object(cuda_graphs, "is_capturing", lambda device: _is_gpu(device) and capture is not None)
        )
        stack.enter_context(patch.object(cuda_graphs, "_number", lambda _stream: capture))
        stack.enter_context(patch.object(cuda_graphs, "_stream", lambda _device: 0))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda _device=None: (9, 0)))
        stack.enter_context(patch.object(step_counters, "_stream", lambda _device: 0))
        stack.enter_context(patch.object(backends, "_backend_for", lambda *_: "triton"))
        stack.enter_context(patch.object(backends, "is_plain", lambda *_: True))
        stack.enter_context(launching(gpu.launch))
        stack.enter_context(torch.no_grad())
        stack.enter_context(gpu)
        yield gpu
