"""The launches of every Triton kernel, captured where the launchers would launch.

Requests cover each format, orientation and rounding once with everything that a kernel can return (operand
and counts), because that needs most registers, and then what layers ask for in training. A launcher's own
arguments are captured, so a kernel is compiled or checked as it is launched, also on a machine without a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import megalowbit as mlb
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED
from megalowbit.quantize import reference
from megalowbit.quantize import triton as kernel_package
from megalowbit.quantize.encoding import E4M3, E5M2, DecodeRequest, Encoded, EncodeRequest
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.triton import launch_arguments, launch_fp4, launch_fp8, launch_fp32_scales
from megalowbit.quantize.triton.fixed_arguments import FixedArguments
from megalowbit.quantize.triton.launch_fp8 import Fp8Side
from megalowbit.spectral import triton as factor_package
from megalowbit.spectral.orthogonal import LEAST_SHARE, SHIFT, STRONG_SHIFT
from megalowbit.spectral.triton import launch_factor_codes, launch_factors, launch_residual

KEY = RandomKey(2**63 + 0x12345678ABCD, 2**40 + 5)
SIGNS = 0xA5C3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = (E4M3, E5M2)
ROUNDED = (  # a quantizer of each format and rounding that has a kernel
    "nvfp4e2m1bnosr",
    "nvfp4e2m1b",
    "nvfp4e2m1b:unbiased",
    "nvfp4e2m1bnosr:4over6",
    "nvfp4e2m1bnosr:tile16",
    "nvfp4e2m1b:tile16",
    "mxfp4e2m1bnosr",
    "mxfp4e2m1b",
    "int8",
    "int8:sr",
    "int8b",
    "int4:sr",
    "fp8e4m3:sr",
    "fp8e4m3b",
    "fp8e5m2:sr",
    "int8e5m2b",
    "int8e5m2b:sr",
)
TRAINED = ROUNDED[:2] + ROUNDED[6:8]  # what the layers of the shipped recipes quantise with
DECODED = (
    "nvfp4e2m1bnosr",
    "nvfp4e2m1bnosr:tile16",
    "mxfp4e2m1bnosr",
    "int8",
    "int8b",
    "fp8e4m3",
    "int8e5m2b",
)


class Fp8Request(NamedTuple):
    """Arguments of `launch_fp8.decode`."""

    codes: Tensor
    scales: Tensor
    exponents: Tensor
    rows: int
    cols: int
    dtype: torch.dtype
    transpose: bool


class ProductRequest(NamedTuple):
    """Arguments of `launch_fp8.correct`."""

    product: Tensor
    left: Fp8Side
    right: Fp8Side
    counts: Tensor


class FactorRequest(NamedTuple):
    """Arguments of a step of `low_rank.qb`: matrix and directions (k, cols); its factors are quantised."""

    matrix: Tensor
    directions: Tensor


class ResidualRequest(NamedTuple):
    """Arguments of `launch_residual.residual`."""

    matrix: Tensor
    tall: Tensor
    flat: Tensor


Request = EncodeRequest | DecodeRequest | Fp8Request | ProductRequest | FactorRequest | ResidualRequest


class Launch(NamedTuple):
    """One launch of a kernel: by which request, with how many programs, and the arguments by name."""

    label: str
    kernel: Any
    programs: int
    arguments: dict[str, Any]


def turned(x: Tensor) -> Tensor:
    """The same matrix, column-major."""
    return x.t().contiguous().t()


def encode_requests(x: Tensor) -> dict[str, EncodeRequest]:
    """Requests that quantise a matrix (fp32), by what a table calls them."""
    everything = {"operand_dtype": BF16, "with_counts": True, "random_key": KEY}
    half, requests = x.to(BF16), {}
    for direction, matrix in (("row", half), ("column", turned(half))):
        for name in ROUNDED:
            encoding = mlb.quantizer(name).encoding
            requests[f"{name}, {direction}, operand and counts"] = EncodeRequest(
                matrix, encoding, **everything
            )
            if name in TRAINED:
                requests[f"{name}, {direction}, operand"] = EncodeRequest(
                    matrix, encoding, KEY, operand_dtype=BF16
                )
            if name in TRAINED and encoding.format == MXFP4:
                requests[f"{name}, {direction}, operand in E4M3"] = EncodeRequest(
                    matrix, encoding, KEY, operand_dtype=E4M3
                )
    nearest, stochastic, int8 = (
        mlb.quantizer(name).encoding for name in ("nvfp4e2m1bnosr", "nvfp4e2m1b", "int8")
    )
    requests["nvfp4e2m1bnosr, row, codes"] = EncodeRequest(half, nearest)
    requests["nvfp4e2m1bnosr, row of fp32, fp32 operand"] = EncodeRequest(x, nearest, operand_dtype=FP32)
    requests["nvfp4e2m1b, row of fp16, operand"] = EncodeRequest(
        x.to(FP16), stochastic, KEY, operand_dtype=BF16
    )
    requests["int8, row of fp16, operand, maximum given"] = EncodeRequest(
        x.to(FP16), int8, operand_dtype=FP16, tensor_amax=x.abs().amax()
    )
    if x.shape[1] % 16 == 0:
        requests["nvfp4e2m1b, row, Hadamard"] = EncodeRequest(half, stochastic, KEY, SIGNS)
        requests["nvfp4e2m1b, column, Hadamard"] = EncodeRequest(turned(half), stochastic, KEY, SIGNS)
        requests["int8, row, Hadamard"] = EncodeRequest(half, int8, signs=SIGNS, operand_dtype=FP32)
    return requests


def decode_requests(x: Tensor) -> dict[str, DecodeRequest | Fp8Request]:
    """Requests that decode the codes of a matrix (fp32)."""
    requests: dict[str, DecodeRequest | Fp8Request] = {}
    for name in DECODED:
        encoding = mlb.quantizer(name).encoding
        encoded, format = reference.encode(EncodeRequest(x, encoding)), encoding.format
        for direction in ("straight", "transposed"):
            is_turned = direction == "transposed"
            for dtype in (BF16, FP32) if format == NVFP4 else (BF16,):
                requests[f"decode {name} to {str(dtype)[6:]}, {direction}"] = DecodeRequest(
                    encoded.codes, encoded.scales, format, *x.shape, dtype, is_turned
                )
            for fp8 in FP8 if format == MXFP4 else ():
                requests[f"decode {name} to {str(fp8)[6:]}, {direction}"] = Fp8Request(
                    encoded.codes, encoded.scales, _exponents(encoded), *x.shape, fp8, is_turned
                )
    return requests


def product_requests(x: Tensor) -> dict[str, ProductRequest]:
    """Requests that multiply a matrix (fp32) by its transpose again, because its exponents do not fit."""
    encoded = reference.encode(EncodeRequest(x, mlb.quantizer("mxfp4e2m1bnosr").encoding))
    far = torch.tensor([200, -100], dtype=torch.int32)  # highest, and lowest negated
    requests = {}
    for product, is_turned in (("x xᵀ", False), ("xᵀ x", True)):
        left, right = (
            Fp8Side(encoded.codes, encoded.scales, far, (x.shape[0], x.shape[1]), E4M3, transpose)
            for transpose in (is_turned, not is_turned)
        )
        size = x.shape[1 if is_turned else 0]
        for dtype in (BF16, FP32):
            out, counts = torch.empty(size, size, dtype=dtype), torch.zeros(2, dtype=torch.int32)
            requests[f"{product} of mxfp4e2m1bnosr, {str(dtype)[6:]}"] = ProductRequest(
                out, left, right, counts
            )
    return requests


def factor_requests(x: Tensor) -> dict[str, FactorRequest | ResidualRequest]:
    """Requests that factor a matrix (fp32) and subtract, with few directions and with many."""
    matrix, requests = x.to(BF16), dict[str, FactorRequest | ResidualRequest]()
    for rank in (5, min(60, *x.shape)):
        flat = matrix[:rank].contiguous()
        requests[f"factors, rank {rank}"] = FactorRequest(matrix, flat)
        tall = matrix[:, :rank].contiguous()
        requests[f"residual, row, rank {rank}"] = ResidualRequest(matrix, tall, flat)
        requests[f"residual, column, rank {rank}"] = ResidualRequest(turned(matrix), tall, flat)
    return requests


def factored(request: FactorRequest) -> tuple[Any, ...]:
    """A step of `low_rank.qb` by the kernels, and the parts of its quantised factors."""
    matrix, directions = request
    shifts = {"shift": SHIFT * torch.finfo(FP32).eps, "strong_shift": STRONG_SHIFT}
    left = launch_factors.cholesky_rows(
        (matrix @ directions.t()).t(), least=1e-3, share=LEAST_SHARE, **shifts
    ).rows
    found = launch_factors.ordered(left, left @ matrix, directions, least=1e-3)
    default = mlb.quantizer(launch_factor_codes.COVERED)
    made = launch_factor_codes.quantized(default, found.left, found.right, found.values, found.maxima)
    sides = made.left, made.right
    parts = (part for each in sides for part in (each.codes, each.scales, each.tensor_scale))
    return (found, *parts, made.tall, made.flat)


def _exponents(encoded: Encoded) -> Tensor:
    return reference.block_exponents(encoded.codes, encoded.scales)


def run(request: Request) -> Any:
    """Run a request by the launcher of its format; returns what that returns."""
    if isinstance(request, Fp8Request):
        return launch_fp8.decode(*request[:5], dtype=request.dtype, transpose=request.transpose)
    if isinstance(request, ProductRequest):
        return launch_fp8.correct(*request)
    if isinstance(request, FactorRequest):
        return factored(request)
    if isinstance(request, ResidualRequest):
        return launch_residual.residual(*request)
    format = request.encoding.format if isinstance(request, EncodeRequest) else request.format
    launcher = launch_fp32_scales if launch_fp32_scales.is_for(format) else launch_fp4
    assert launcher is launch_fp32_scales or format in (NVFP4, NVFP4_TILED, MXFP4)
    return launcher.encode(request) if isinstance(request, EncodeRequest) else launcher.decode(request)


def launcher_modules() -> Iterator[Any]:
    """The modules of the Triton backend."""
    for package in (kernel_package, factor_package):
        for each in pkgutil.iter_modules(package.__path__):
            if each.name == "probe":  # launches a kernel of one line itself, to find out whether that works
                continue
            yield importlib.import_module(f"{package.__name__}.{each.name}")


def kernel_names() -> set[str]:
    """`module.kernel` of every kernel of the Triton backend; functions that kernels call are none."""
    return {
        f"{module.__name__.split('.')[-1]}.{name}"
        for module in launcher_modules()
        for name, value in vars(module).items()
        if name.endswith("_kernel") and getattr(value, "fn", value).__module__ == module.__name__
    }


def name_of(kernel: Any) -> str:
    """`module.kernel`, as in `kernel_names`."""
    return f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"


@contextmanager
def launching(instead: Callable[..., None]) -> Iterator[None]:
    """Call `instead` wherever a launcher would launch, with the arguments of `launch_arguments.launch`."""

    def complete(kernel: Any, device: torch.device, fixed: FixedArguments, **given: Any) -> None:
        instead(kernel, fixed.programs, device, **fixed.complete(given))

    with ExitStack() as stack:
        for name, replacement in (("launch", instead), ("launch_fixed", complete)):
            own = getattr(launch_arguments, name)
            for module in launcher_modules():
                if getattr(module, name, None) is own:
                    stack.enter_context(patch.object(module, name, replacement))
        yield


def captured(requests: dict[str, Request]) -> list[Launch]:
    """The launches of requests, without running them; what a kernel would have written stays undefined."""
    launches: list[Launch] = []

    def keep(kernel: Any, programs: int, _device: torch.device, **arguments: Any) -> None:
        launches.append(Launch(label, kernel, programs, arguments))

    with launching(keep):
        for label, request in requests.items():  # noqa: B007 -- `keep` reads it
            run(request)
    return launches


def all_launches(rows: int = 256, cols: int = 512) -> list[Launch]:
    """The launches of every request on a matrix of zeros, by default as divisible as those of layers."""
    x = torch.zeros(rows, cols)
    tall = torch.zeros(2 * launch_factors.PARTS * launch_factors.GRAM_TILE, 64)  # parts of more than one tile
    long = {f"{label}, long": request for label, request in factor_requests(tall).items() if "60" in label}
    return captured(
        {**encode_requests(x), **decode_requests(x), **product_requests(x), **factor_requests(x), **long}
    )
