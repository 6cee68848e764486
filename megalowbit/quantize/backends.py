"""One dispatch for quantising and decoding: Triton on CUDA, a C kernel on CPUs, plain torch otherwise.

All three give the same bits. Which one a device uses is said once in the log; `MEGALOWBIT_BACKEND` (`torch`,
`c`, `triton`) forces one, and it is an error if that one cannot be had. A format that the fast paths do not
cover goes through plain torch, which is said once as well; so do fake tensors (estimates of memory).
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError, unknown_name
from megalowbit.formats.block_format import BlockFormat
from megalowbit.quantize import kernels_cpu, launch_triton, reference
from megalowbit.quantize.encoding import Encoded, Encoding
from megalowbit.quantize.philox import NO_KEY, RandomKey

BACKEND_VARIABLE = "MEGALOWBIT_BACKEND"
BACKENDS = ("torch", "c", "triton")
logger = logging.getLogger("megalowbit")


def encode(
    x: Tensor,
    encoding: Encoding,
    *,
    random_key: RandomKey = NO_KEY,
    signs: int | None = None,
    tensor_amax: Tensor | None = None,
    operand_dtype: torch.dtype | None = None,
    with_counts: bool = False,
) -> Encoded:
    """Quantise a matrix with the device's backend; as `reference.encode`."""
    kernels = _kernels(backend_of(x))
    covers = kernels is not None and kernels.supports(x.dtype, encoding, operand_dtype)
    if kernels is not None and not covers:
        _say_uncovered(x.device, "quantising", encoding.format, x.dtype)
    path = kernels if kernels is not None and covers else reference
    return path.encode(
        x,
        encoding,
        random_key=random_key,
        signs=signs,
        tensor_amax=tensor_amax,
        operand_dtype=operand_dtype,
        with_counts=with_counts,
    )


def decode(
    codes: Tensor,
    scales: Tensor,
    format: BlockFormat,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> Tensor:
    """Codes × block scale with the device's backend; as `reference.decode`."""
    kernels = _kernels(backend_of(codes))
    covers = kernels is not None and codes.numel() > 0 and kernels.supports_decoding(format, dtype)
    if kernels is not None and not covers and codes.numel() > 0:
        _say_uncovered(codes.device, "decoding", format, dtype)
    path = kernels if kernels is not None and covers else reference
    return path.decode(codes, scales, format, rows, cols, dtype, transpose=transpose)


def backend_of(x: Tensor) -> str:
    """Name of the backend that serves this tensor: one of `BACKENDS`.

    Raises:
        UserError: `MEGALOWBIT_BACKEND` names no backend, or one that this device cannot have.
    """
    if isinstance(x, FakeTensor) or x.device.type == "meta":
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


@functools.lru_cache(maxsize=256)  # said once for each
def _say_uncovered(device: torch.device, work: str, format: BlockFormat, dtype: torch.dtype) -> None:
    block = "one scale" if format.block is None else "scales for {} × {}".format(*format.block)
    kind = f"{format.element.name} under {format.scale} {block}, {dtype}"
    logger.info("%s %s on %s with plain torch operations: no kernel covers it", work, kind, device)


def _kernels(backend: str) -> ModuleType | None:
    return {"c": kernels_cpu, "triton": launch_triton}.get(backend)


def _why_not(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot serve a device; `None` if it can."""
    if backend == "c":
        return kernels_cpu.why_unavailable() if device.type == "cpu" else "it runs on CPUs only"
    if backend == "triton" and not launch_triton.is_available(device):
        if device.type == "cuda":
            return "Triton is not installed: pip install triton"
        return "it runs on CUDA devices (on a CPU in Triton's interpreter, with TRITON_INTERPRET=1)"
    return None
