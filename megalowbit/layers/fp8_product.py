"""Products of MXFP4 operands on FP8 tensor cores, exactly where that is possible.

An MXFP4 number is an E2M1 element times a power of two for its block, so element · 2^(e − e_max + shift)
under one power of two for the whole tensor is an FP8 number as long as the tensor's block exponents e lie
close together: in E4M3 up to 14 below the largest (shift 6: 384 down to 2⁻⁹), in E5M2 up to 28 (shift 13).
Blocks of zeros do not count. A product runs in FP8 if both operands fit and not both need E5M2 (hardware
multiplies no such pair), its sizes are multiples of 16 and its scales normal fp32 numbers; otherwise
`multiply` declines, and the layer multiplies in bf16 and counts that.

The spread of exponents decides which kernel runs, so the host must read it: two numbers for each operand,
one read for all operands of a product (of both products in backward), about 10–20 µs and the end of running
ahead of the GPU. It is kept with the factor, for the second product of the same tensor.

Hopper's FP8 tensor cores add products in fewer bits than fp32 holds; `use_fast_accum=False` has partial
sums added up in fp32 every 128 elements, and what is left of that error is measured in the tests on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.factor import ExponentRange, Factor
from megalowbit.layers.gemms import finish, no_autocast
from megalowbit.quantize import backends
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIFT = {E4M3: 6, E5M2: 13}  # 6 · 2^shift is the largest number used
DEPTH = {E4M3: 14, E5M2: 28}  # how far below the largest exponent every element is exact
SIZE_MULTIPLE = 16
_NAN, _BIAS = 255, 127  # of E8M0
_NONE = ExponentRange(lowest=_BIAS, highest=_BIAS)  # of a tensor of zeros


def why_unavailable(device: torch.device) -> str | None:
    """Why a device cannot multiply FP8 matrices; `None` if it can."""
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return "FP8 needs compute capability 8.9 (Ada, Hopper) or later"
    return None if device.type in ("cpu", "cuda") else "PyTorch multiplies FP8 matrices on CPU and CUDA only"


def measure(*factors: Factor) -> None:
    """Find out the exponent ranges of MXFP4 factors that have none yet, in one host read for all."""
    unknown = [
        factor
        for factor in {id(each): each for each in factors}.values()
        if factor.exponents is None and _is_mxfp4(factor) and not isinstance(factor.tensor.codes, FakeTensor)
    ]
    if not unknown:
        return
    found = torch.stack([end for factor in unknown for end in _exponent_ends(factor)]).tolist()
    for factor, lowest, highest in zip(unknown, found[::2], found[1::2], strict=True):
        factor.exponents = ExponentRange(lowest=lowest, highest=highest) if highest >= 0 else _NONE


def _is_mxfp4(factor: Factor) -> bool:
    tensor = factor.tensor
    return isinstance(tensor, QuantizedTensor) and tensor.format.scale == "e8m0"


def _exponent_ends(factor: Factor) -> tuple[Tensor, Tensor]:
    """Lowest and highest exponent code of blocks that count, 0-dim int64; -1 as highest if there are none."""
    codes, scales = factor.tensor.codes, factor.tensor.scales
    assert codes is not None, "MXFP4"
    assert scales is not None, "MXFP4"
    if codes.numel() == 0:
        return tuple(torch.tensor([_NAN, -1], device=codes.device).unbind())  # type: ignore[return-value]
    exponents = scales.view(torch.uint8).to(torch.int64)
    magnitudes = (codes & 0x77).unflatten(1, (exponents.shape[1], -1))
    counts = magnitudes.amax(2).ne(0) & (exponents != _NAN)
    return torch.where(counts, exponents, _NAN).amin(), torch.where(counts, exponents, -1).amax()


def dtype_for(exponents: ExponentRange) -> torch.dtype | None:
    """The FP8 dtype that holds all elements exactly: E4M3 if possible, E5M2, or `None`."""
    spread = exponents.highest - exponents.lowest
    return next((dtype for dtype in (E4M3, E5M2) if spread <= DEPTH[dtype]), None)


def decode_fp8(factor: Factor, dtype: torch.dtype, *, transpose: bool = False) -> Tensor:
    """A measured factor's matrix as FP8, contiguous; times 2^`scale_exponent` it is the decoded matrix.

    Args:
        factor: MXFP4.
        dtype: as `dtype_for` says.
        transpose: return (cols, rows) instead of (rows, cols).
    """
    tensor, exponents = factor.tensor, factor.exponents
    assert isinstance(tensor, QuantizedTensor)
    assert exponents is not None, "measure the factor first"
    rows, cols = matrix_shape(tensor.shape)
    if backends.backend_of(tensor.codes) == "triton":
        from megalowbit.quantize.launch_triton import decode_fp8 as decode_on_gpu

        return decode_on_gpu(
            tensor.codes, tensor.scales, rows, cols, dtype=dtype, per_row=False, transpose=transpose
        )[0]
    depth, codes = DEPTH[dtype], tensor.codes
    stored = tensor.scales.view(torch.uint8).to(torch.int32)
    row = (stored - (exponents.highest - depth)).clamp(0, depth).masked_fill(stored == _NAN, depth + 1)
    words = codes.unflatten(1, (row.shape[1], -1)).to(torch.int32)
    pairs = _table(tensor, dtype)[words + row.unsqueeze(2) * 256]  # (rows, blocks, 16), two numbers each
    matrix = pairs.flatten(1).view(torch.uint8)[:, :cols]
    return (matrix.t() if transpose else matrix).contiguous().view(dtype)


def _table(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """FP8 numbers of a byte of two codes, as int16, by exponents below the largest; the last row is NaN."""
    values = torch.tensor(tensor.format.element.code_values())
    powers = torch.ldexp(
        torch.ones(DEPTH[dtype] + 1), torch.arange(DEPTH[dtype] + 1) - DEPTH[dtype] + SHIFT[dtype]
    )
    numbers = torch.outer(torch.cat([powers, torch.tensor([torch.nan])]), values).to(dtype).view(torch.uint8)
    byte = torch.arange(256)
    pairs = torch.stack([numbers[:, byte & 15], numbers[:, byte >> 4]], dim=2)
    return pairs.flatten(1).view(torch.int16).flatten().to(tensor.codes.device)


def scale_exponent(exponents: ExponentRange, dtype: torch.dtype) -> int:
    """The exponent of the power of two that a tensor's FP8 numbers are to be multiplied by."""
    return exponents.highest - _BIAS - SHIFT[dtype]


def multiply(
    left: Factor,
    right: Factor,
    *,
    transpose_left: bool,
    transpose_right: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Multiply left · right + bias in FP8, or `None` where that would not be exact.

    Args:
        left: (m, k) as stored, or (k, m) with `transpose_left`.
        right: (k, n) as stored, or (n, k) with `transpose_right`.
        transpose_left: multiply by the transpose of what is stored.
        transpose_right: as above.
        out_dtype: of the result.
        bias: (n,), added in fp32.

    Raises:
        UserError: the device has no FP8.
    """
    if not (_is_mxfp4(left) and _is_mxfp4(right)):
        return None
    measure(left, right)
    chosen = _choose(left, right)
    if chosen is None:
        return None
    device = left.tensor.codes.device  # type: ignore[union-attr]
    reason = why_unavailable(device)
    if reason is not None:
        raise UserError(f'gemm "fp8" cannot run on {device}: {reason}; set gemm to "bf16" in the recipe')
    a = decode_fp8(left, chosen[0], transpose=transpose_left)
    b = decode_fp8(right, chosen[1], transpose=not transpose_right).t()
    scales = [
        torch.full((), 2.0 ** scale_exponent(factor.exponents or _NONE, dtype), device=device)
        for factor, dtype in zip((left, right), chosen, strict=True)
    ]
    with no_autocast(device.type):
        product = torch._scaled_mm(
            a,
            b,
            scale_a=scales[0],
            scale_b=scales[1],
            out_dtype=torch.float32 if bias is not None else out_dtype,
            use_fast_accum=False,
        )
        return finish(product, None, bias, out_dtype)


def _choose(left: Factor, right: Factor) -> tuple[torch.dtype, torch.dtype] | None:
    """FP8 dtypes of both operands; `None` where the product has to run in bf16."""
    sizes = (*matrix_shape(left.tensor.shape), *matrix_shape(right.tensor.shape))
    if left.exponents is None or right.exponents is None or any(n == 0 or n % SIZE_MULTIPLE for n in sizes):
        return None
    dtypes = dtype_for(left.exponents), dtype_for(right.exponents)
    if dtypes[0] is None or dtypes[1] is None or dtypes == (E5M2, E5M2):
        return None
    ends = [scale_exponent(left.exponents, dtypes[0]), scale_exponent(right.exponents, dtypes[1])]
    is_normal = all(-126 <= end <= 127 for end in (*ends, sum(ends)))
    return (dtypes[0], dtypes[1]) if is_normal else None
