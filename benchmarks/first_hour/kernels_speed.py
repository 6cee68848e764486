"""Step 3: time of the kernels, as µs for 33.5 M elements (8192 × 4096), in a matrix that no cache holds.

Limits are for an H200: 1.5 times what its copy bandwidth and instruction rates predict.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, info, skip
from benchmarks.first_hour.session import NO_GPU, Session
from benchmarks.timing import cache_note
from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import E4M3, DecodeRequest, EncodeRequest
from megalowbit.quantize.philox import RandomKey

KEY = RandomKey(1)
BF16 = torch.bfloat16
UNIT = 8192 * 4096  # elements


class Kernel(NamedTuple):
    """Bytes per element, and predicted and largest allowed µs for 33.5 M elements."""

    bytes: float
    predicted: float
    limit: float


KERNELS = {
    "maximum, row": Kernel(2.0, 22, 35),
    "maximum, column": Kernel(2.0, 22, 35),
    "NVFP4 nearest + operand": Kernel(4.56, 47, 65),
    "NVFP4 nearest + operand of the transpose": Kernel(4.56, 47, 65),
    "NVFP4 stochastic + operand": Kernel(4.56, 66, 90),
    "NVFP4 nearest + operand + counts": Kernel(4.56, 118, 180),
    "NVFP4 stochastic + operand + counts": Kernel(4.56, 129, 180),
    "MXFP4 nearest + operand": Kernel(4.53, 45, 60),
    "MXFP4 to E4M3": Kernel(1.53, 40, 60),
    "MXFP4 to E4M3, transposed": Kernel(1.53, 50, 60),
    "NVFP4 to bf16": Kernel(2.56, 26, 40),
    "NVFP4 to bf16, transposed": Kernel(2.56, 26, 40),
}


def check(session: Session) -> Iterator[Finding]:
    """Every kernel of training, in interleaved rounds with a copy."""
    size = session.size(16384, 256)
    x = torch.randn(size, size, device=session.device).to(BF16)
    runs = candidates(session, x)
    times = session.time(runs)
    units = x.numel() / UNIT
    peer = statistics.median(times["copy"])
    note = cache_note(x.nbytes, session.device)
    for label, kernel in KERNELS.items():
        if label not in times:
            yield skip(label, NO_GPU)
            continue
        seconds, state = statistics.median(times[label]), times.state(label)
        rate = f"{kernel.bytes * x.numel() / seconds / 1e12:.2f} TB/s, {seconds / peer:.2f} × copy"
        if session.is_gpu:
            yield at_most(
                label,
                seconds / units * 1e6,
                kernel.limit,
                " µs",
                warn=kernel.predicted,
                note=note or rate,
                state=state,
            )
        else:
            yield info(f"{label}, {size}²", seconds * 1e6, " µs", note=f"the CPU's kernel; {rate}")


def candidates(session: Session, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed; maxima and FP8 operands are kernels of GPUs only."""
    amax = x.abs().amax().float()
    encodings = {
        name: mlb.quantizer(name).encoding for name in ("nvfp4e2m1bnosr", "nvfp4e2m1b", "mxfp4e2m1bnosr")
    }
    nearest, stochastic, mxfp4 = encodings.values()

    def encode(encoding: Any, matrix: torch.Tensor = x, **options: Any) -> Callable[[], object]:
        given = amax if encoding.format.has_tensor_scale else None
        request = EncodeRequest(matrix, encoding, KEY, tensor_amax=given, operand_dtype=BF16, **options)
        return lambda: backends.encode(request)

    packed = {each: backends.encode(EncodeRequest(x, each)) for each in (nearest, mxfp4)}

    def decode(transpose: bool) -> Callable[[], object]:
        codes = packed[nearest]
        request = DecodeRequest(
            codes.codes, codes.scales, nearest.format, *x.shape, BF16, transpose, codes.tensor_scale
        )
        return lambda: backends.decode(request)

    found: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "NVFP4 nearest + operand": encode(nearest),
        "NVFP4 nearest + operand of the transpose": encode(nearest, x.t()),
        "NVFP4 stochastic + operand": encode(stochastic),
        "NVFP4 nearest + operand + counts": encode(nearest, with_counts=True),
        "NVFP4 stochastic + operand + counts": encode(stochastic, with_counts=True),
        "MXFP4 nearest + operand": encode(mxfp4),
        "NVFP4 to bf16": decode(False),
        "NVFP4 to bf16, transposed": decode(True),
    }
    if session.is_gpu:
        found |= gpu_only(x, nearest, packed[mxfp4])
    return found


def gpu_only(x: torch.Tensor, nearest: Any, mxfp4: Any) -> dict[str, Callable[[], object]]:
    """The tensor's maximum alone, and FP8 operands."""
    from benchmarks.kernels.launches import captured
    from megalowbit.quantize.triton import launch_arguments, launch_fp8

    exponents = reference.block_exponents(mxfp4.codes, mxfp4.scales)

    def fp8(transpose: bool) -> Callable[[], object]:
        return lambda: launch_fp8.decode(
            mxfp4.codes, mxfp4.scales, exponents, *x.shape, dtype=E4M3, transpose=transpose
        )

    def maximum(matrix: torch.Tensor) -> Callable[[], object]:
        first, _ = captured({"maximum": EncodeRequest(matrix, nearest)})
        return lambda: launch_arguments.launch(first.kernel, first.programs, matrix.device, **first.arguments)

    return {
        "maximum, row": maximum(x),
        "maximum, column": maximum(x.t()),
        "MXFP4 to E4M3": fp8(False),
        "MXFP4 to E4M3, transposed": fp8(True),
    }
