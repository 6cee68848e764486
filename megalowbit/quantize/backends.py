"""Chooses the backend for quantising and decoding: Triton on CUDA, C on CPUs, plain torch otherwise.

All three give the same bits. The backend of a device is logged once. `MEGALOWBIT_BACKEND` (`torch`, `c`,
`triton`) forces a backend, and raises an error if it is not available. Formats that the kernels do not
support use plain torch, which is logged once too. So do tensors that are not plain memory (`is_plain`),
because kernels take addresses, and a trace would not record them. Dispatch modes that only watch, such as
`FlopCounterMode`, see that results are allocated, but not the kernels; they do not change the backend.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megalowbit.errors import UserError, unknown_name
from megalowbit.formats.block_format import MXFP4, BlockFormat
from megalowbit.quantize import reference
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.cpu import fp32_scales as kernels_cpu_8bit
from megalowbit.quantize.encoding import (
    DecodeRequest,
    Encoded,
    EncodeRequest,
    Encoding,
    Fp8Operand,
    check_parts,
    new_encoded,
    no_counts,
)
from megalowbit.quantize.triton import launch_fp4 as launch_triton
from megalowbit.quantize.triton import launch_fp8
from megalowbit.quantize.triton import launch_fp32_scales as launch_triton_8bit

BACKEND_VARIABLE = "MEGALOWBIT_BACKEND"
BACKENDS = ("torch", "c", "triton")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of matrices that kernels quantise
logger = logging.getLogger("megalowbit")


class Kernels(Protocol):
    """The interface of a module of kernels for some formats, bit-equal to `reference`."""

    def covers(self, format: BlockFormat, dtype: torch.dtype) -> bool:
        """Whether `encode` and `decode` support this format with operands of this dtype."""

    def encode(self, request: EncodeRequest) -> Encoded:
        """See `reference.encode`."""

    def decode(self, request: DecodeRequest) -> Tensor:
        """See `reference.decode`."""


def encode(request: EncodeRequest) -> Encoded:
    """Quantise a matrix with the device's backend; same result as `reference.encode`.

    Raises:
        UserError: an operand in FP8, or exponents, are requested of another format than MXFP4.
    """
    x, format = request.x, request.encoding.format
    needs_exponents = request.with_exponents or request.fp8_dtype is not None
    if needs_exponents and format != MXFP4:
        raise UserError(f"{format} has no exact FP8 operand: quantise to MXFP4, or ask for bf16")
    kernels = _kernels(backend_of(x, request.tensor_amax), format)
    if kernels is launch_triton and can_encode(kernels, request):
        return launch_triton.encode(request)
    if needs_exponents:  # other backends have no kernels for them
        return _with_exponents(request)
    if kernels is not None:
        if can_encode(kernels, request):
            return kernels.encode(request)
        _say_uncovered(x.device, "quantising", format, x.dtype)
    return _without_values(request) if _has_no_values(x) else reference.encode(request)


def _without_values(request: EncodeRequest) -> Encoded:
    """Tensors of the result's shapes and dtypes, which `reference` would make in some hundred operations."""
    counts, error = no_counts(request.x.device) if request.with_counts else (None, None)
    return new_encoded(request)._replace(counts=counts, error=error)


def _has_no_values(x: Tensor) -> bool:
    """Whether x is a fake tensor that nobody traces, as in estimates of memory: only shapes count then."""
    if type(x) is not FakeTensor or torch._C._is_tracing() or _functorch.peek_interpreter_stack() is not None:
        return False
    modes = _dispatch_modes()  # a tracer has one; without a mode, new tensors would be real ones
    return bool(modes) and all(type(mode) is FakeTensorMode for mode in modes)


def _with_exponents(request: EncodeRequest) -> Encoded:
    dtype = request.fp8_dtype
    narrow = None if dtype is not None else request.operand_dtype
    encoded = encode(request._replace(operand_dtype=narrow, with_exponents=False))
    exponents = reference.block_exponents(encoded.codes, encoded.scales)
    if dtype is None:
        return encoded._replace(exponents=exponents)
    rows, cols = request.x.shape
    fp8 = decode_fp8(encoded.codes, encoded.scales, exponents, rows, cols, dtype=dtype)
    return encoded._replace(exponents=exponents, fp8=fp8)


def maximum(request: EncodeRequest) -> Tensor | None:
    """The maximum that a tensor scale follows from, by a kernel; `None`: no kernel computes it separately.

    It includes `q_scalar`. Requires a format with a tensor scale, and a request without `tensor_amax`.
    """
    kernels = _kernels(backend_of(request.x), request.encoding.format)
    for launcher in (launch_triton, launch_triton_8bit):
        if kernels is launcher and can_encode(launcher, request):
            found: Tensor = launcher.maximum(request)
            return found
    return None


def can_encode(kernels: Kernels, request: EncodeRequest) -> bool:
    """Whether kernels support this request."""
    operand_dtype = request.operand_dtype or torch.bfloat16
    # a protocol does not say that its modules are hashable
    return _can_encode(kernels, request.encoding, request.x.dtype, operand_dtype)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)  # each operand asks
def _can_encode(kernels: Kernels, encoding: Encoding, dtype: torch.dtype, operand_dtype: torch.dtype) -> bool:
    return dtype in KERNEL_DTYPES and encoding.has_kernels and kernels.covers(encoding.format, operand_dtype)


def has_random_kernel(encoding: Encoding, device: torch.device) -> bool:
    """Whether a Triton kernel draws this encoding's random numbers, with a key that may be in memory."""
    kernels = _kernels(_backend_for(device, os.environ.get(BACKEND_VARIABLE, "")), encoding.format)
    if kernels is None or kernels not in (launch_triton, launch_triton_8bit):
        return False
    return encoding.has_kernels and kernels.covers(encoding.format, torch.bfloat16)


def decode(request: DecodeRequest) -> Tensor:
    """Codes × block scale with the device's backend; same result as `reference.decode`.

    Raises:
        UserError: codes or scales do not belong to a matrix of this size.
    """
    codes, scales, format, rows, cols, dtype, _, tensor_scale = request
    check_parts(codes, scales, format, rows, cols)
    kernels = _kernels(backend_of(codes, scales, tensor_scale), format)
    if kernels is not None and codes.numel() > 0:
        if kernels.covers(format, dtype):
            return kernels.decode(request)
        _say_uncovered(codes.device, "decoding", format, dtype)
    return reference.decode(request)


def decode_fp8(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
    rows: int,
    cols: int,
    *,
    dtype: torch.dtype,
    transpose: bool = False,
) -> Fp8Operand:
    """MXFP4 as an operand in `dtype`, E4M3 or E5M2; the device's backend decodes.

    Numbers of blocks more than `DEPTH` below the highest exponent are undefined, and the scale is one only
    if it is a normal number. Elements of a NaN block are NaN.

    Args:
        codes: of a matrix (rows, cols), as are the scales.
        scales: see `codes`.
        exponents: `Encoded.exponents` of that matrix.
        rows: of the matrix.
        cols: of the matrix.
        dtype: of the result.
        transpose: write the transpose (cols, rows).

    Raises:
        UserError: codes or scales do not belong to a matrix of this size.
    """
    check_parts(codes, scales, MXFP4, rows, cols)
    if backend_of(codes, scales, exponents) == "triton" and codes.numel() > 0:
        return launch_fp8.decode(codes, scales, exponents, rows, cols, dtype=dtype, transpose=transpose)
    return reference.decode_fp8(codes, scales, exponents, cols, dtype, transpose)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are ordinary tensors with memory, outside of traces and selective checkpointing.

    Not plain: subclasses (distributed, asynchronous, fake tensors, wrappers), sparse layouts, zeros without
    memory, and wrappers of `torch.func`. `None` is always plain.
    """
    if torch._C._is_tracing() or _functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() and any(map(_needs_operations, _dispatch_modes())):
        return False
    for tensor in tensors:  # noqa: SIM110 -- a generator takes twice as long, and each operand asks
        if tensor is not None and not _has_memory(tensor):
            return False
    return True


def is_selective_checkpoint() -> bool:
    """Whether selective activation checkpointing records or repeats a forward here.

    It numbers operations by kind and returns stored results in place of some. A forward and its repetition
    must therefore have the same operations, and no result may be written to behind its back.
    """
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(_stores_results, _dispatch_modes()))


def _dispatch_modes() -> list[Any]:
    count = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(index) for index in range(count)]


def _needs_operations(mode: Any) -> bool:
    """Whether a mode needs every operation: those of torch's tracers, and selective checkpointing."""
    return bool(mode.is_infra_mode()) or _stores_results(mode)


def _stores_results(mode: Any) -> bool:
    return type(mode).__module__ == torch.utils.checkpoint.__name__


def _has_memory(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor._is_zerotensor()
        and not _functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )


def backend_of(x: Tensor, *others: Tensor | None) -> str:
    """Name of the backend for a call with this tensor and `others`: one of `BACKENDS`.

    Raises:
        UserError: `MEGALOWBIT_BACKEND` is not a backend, or is not available on this device.
    """
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        return "torch"
    if not is_plain(x, *others):
        _say_not_plain(type(x))
        return "torch"
    return _backend_for(x.device, os.environ.get(BACKEND_VARIABLE, ""))


@functools.lru_cache(maxsize=64)
def _backend_for(device: torch.device, forced: str) -> str:
    if forced and forced not in BACKENDS:
        raise unknown_name(BACKEND_VARIABLE, forced, BACKENDS)
    chosen = forced or {"cpu": "c", "cuda": "triton"}.get(device.type, "torch")
    reason = _why_not(chosen, device)
    if reason and forced:
        raise UserError(f"{BACKEND_VARIABLE}={forced} cannot be used on {device}: {reason}")
    if reason:
        logger.warning("quantising on %s with plain torch operations, which is slow: %s", device, reason)
        return "torch"
    described = {"torch": "plain torch operations", "c": "the C kernel", "triton": "Triton kernels"}
    logger.info("quantising on %s with %s", device, described[chosen])
    return chosen


@functools.lru_cache(maxsize=256)  # so each message is logged once
def _say_uncovered(device: torch.device, work: str, format: BlockFormat, dtype: torch.dtype) -> None:
    logger.info(
        "%s %s, %s on %s with plain torch operations: no kernel covers it", work, format, dtype, device
    )


@functools.lru_cache(maxsize=64)  # so each message is logged once
def _say_not_plain(kind: type[Tensor]) -> None:
    logger.info("%s that is traced or not plain memory: quantised with plain torch operations", kind.__name__)


def load_kernels(device: torch.device) -> None:
    """Compile and load the C libraries of all formats if a device uses them, which a first call would do.

    A first step that compiles looks like a hung one. Triton compiles in the first call in any case. A library
    of 8-bit formats that cannot be compiled is reported when such a format is used.

    Raises:
        UserError: `MEGALOWBIT_BACKEND` names a backend that cannot be used.
    """
    if _backend_for(device, os.environ.get(BACKEND_VARIABLE, "")) == "c":
        kernels_cpu_8bit.LIBRARY.why_unavailable()


def _kernels(backend: str, format: BlockFormat) -> Kernels | None:
    if backend == "c" and kernels_cpu_8bit.is_for(format):
        return _kernels_8bit(os.environ.get(BACKEND_VARIABLE, ""))
    if backend == "triton" and launch_triton_8bit.is_for(format):
        return launch_triton_8bit
    return {"c": kernels_cpu, "triton": launch_triton}.get(backend)


@functools.lru_cache(maxsize=8)
def _kernels_8bit(forced: str) -> Kernels | None:
    reason = kernels_cpu_8bit.LIBRARY.why_unavailable()
    if reason and forced:
        raise UserError(f"{BACKEND_VARIABLE}={forced} cannot be used for 8-bit formats: {reason}")
    if reason:
        logger.warning("8-bit formats use plain torch operations on CPUs, which is slow: %s", reason)
    return None if reason else kernels_cpu_8bit


def _why_not(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot serve a device; `None` if it can."""
    if backend == "c":
        return kernels_cpu.LIBRARY.why_unavailable() if device.type == "cpu" else "it runs on CPUs only"
    if backend == "triton" and not launch_triton.is_available(device):
        if device.type == "cuda":
            return "Triton is not installed: pip install triton"
        return "it runs on CUDA devices (on a CPU in Triton's interpreter, with TRITON_INTERPRET=1)"
    if backend == "triton":
        from megalowbit.quantize.triton.probe import why_unusable

        return why_unusable(device)
    return None
