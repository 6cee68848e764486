"""What quantizers and backends hand to each other: encodings, requests, packed results and their counts.

An encoding is a block format and how numbers get into it. A request names a matrix with everything that is
wanted of it: a new option is a field there, read where it matters.

Counts, with s an element's decoded scale and M the largest element:

- saturated: |x| > M·s, clipped. upper_half: |x| > M/2·s. Both compare x · encode with 2⁻²⁰ of slack, since
  a block's own maximum may exceed M by fp32 rounding alone.
- underflow: x ≠ 0, and its code or its block's scale is 0.
- nonfinite: x is an infinity or a NaN. Finite neighbours are lost with it, yet count nowhere else.
- saturated_scales: E4M3 scales above 448 before the clamp (same slack): only where the tensor's maximum came
  from elsewhere. zero_blocks: blocks whose scale is 0 (E8M0 and signed scales have no 0: whose elements are).
- squared_error Σ(x - q)² and squared_norm Σx² leave out spoiled blocks, so they stay finite.

Padding is no element, and a block of padding alone does not exist.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.formats.block_format import SCALE_DTYPES, BlockFormat
from megalowbit.formats.block_scale import ScaleRounding
from megalowbit.quantize.philox import NO_KEY, RandomKey

COUNT_NAMES = (
    "elements",
    "saturated",
    "upper_half",
    "underflow",
    "nonfinite",
    "blocks",
    "saturated_scales",
    "zero_blocks",
)
ERROR_NAMES = ("squared_error", "squared_norm")

# MXFP4 as FP8 operands: an MXFP4 number is element · 2^e with e for its block. As element · 2^(e - e_max +
# SHIFT), under one power of two for the tensor, it is an FP8 number as long as e lies at most DEPTH below
# e_max, the largest of the blocks that hold more than zeros and NaN.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIFT = {E4M3: 6, E5M2: 13}  # 6 · 2^shift, 384 and 49152, is the largest number used
DEPTH = {E4M3: 14, E5M2: 28}  # how far below the largest exponent every element is exact
MANTISSA = {E4M3: 3, E5M2: 2}  # bits
BIAS = {E4M3: 7, E5M2: 15}

SMALLEST_NORMAL = 2.0**-126  # of fp32
_FITTING = {
    "e4m3": ("nearest", "up"),
    "e8m0": ("down", "up"),
    "fp32": ("nearest",),
    "signed_fp32": ("nearest",),
}


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a quantizer chooses scales and codes.

    Attributes:
        format: of the result.
        is_stochastic: whether elements are rounded stochastically.
        is_unbiased: whether that goes by 23 random bits an element instead of 8, see `formats.codes`.
        scale_rounding: how block scales are rounded to their format, see `formats.block_scale`.
        scale_from: what a scale brings to the largest element: the largest magnitude, or the mean one.
        q_scalar: factor on that magnitude: above 1 leaves headroom, below 1 saturates on purpose.
        four_over_six: whether a block may be scaled to 4 instead of 6 where that has the smaller error
            (arXiv:2512.02010).
    """

    format: BlockFormat
    is_stochastic: bool = False
    is_unbiased: bool = False
    scale_rounding: ScaleRounding = "nearest"
    scale_from: Literal["amax", "mean"] = "amax"
    q_scalar: float = 1.0
    four_over_six: bool = False

    def __post_init__(self) -> None:
        fitting = _FITTING[self.format.scale]
        if self.scale_rounding not in fitting:
            raise UserError(
                f"{self.format.scale} block scales cannot be rounded {self.scale_rounding!r}: "
                f"choose {' or '.join(fitting)}"
            )
        if self.is_unbiased and not self.is_stochastic:
            raise UserError("unbiased is a kind of stochastic rounding: set is_stochastic")
        if not SMALLEST_NORMAL <= ctypes.c_float(self.q_scalar).value < float("inf"):
            raise UserError(
                f"q_scalar must be a normal fp32 number above 0 (1.2e-38 to 3.4e38), not {self.q_scalar!r}"
            )
        if self.format.scale == "signed_fp32" and (self.q_scalar != 1 or self.scale_from != "amax"):
            raise UserError(
                "blocks of INT8 or E5M2 take their scale from their own maximum: leave q_scalar out"
            )
        if self.four_over_six and (self.format.scale != "e4m3" or self.format.block != (1, 16)):
            raise UserError("four-over-six needs NVFP4 blocks of 1 × 16: leave out tile16, or use nvfp4")
        if self.four_over_six and self.is_stochastic:
            raise UserError(
                "four-over-six compares rounding errors: use it with nearest-even rounding (…nosr)"
            )


class EncodeRequest(NamedTuple):
    """A matrix to quantise, and what is wanted of it.

    Attributes:
        x: floating (rows, cols), at least one element, any strides.
        encoding: format and rounding.
        random_key: of the random bytes, where rounding is stochastic.
        signs: transform the rows by Hadamard with these signs first; cols then must be a multiple of 16.
        tensor_amax: fp32, 0-dim: stands for the tensor's largest magnitude.
        operand_dtype: also return the operand, in this dtype.
        with_counts: also return counts and error.
    """

    x: Tensor
    encoding: Encoding
    random_key: RandomKey = NO_KEY
    signs: int | None = None
    tensor_amax: Tensor | None = None
    operand_dtype: torch.dtype | None = None
    with_counts: bool = False


class DecodeRequest(NamedTuple):
    """A packed matrix (rows, cols), padding left out, and as what it is wanted.

    Codes and scales are those of `Encoded`; `transpose` asks for (cols, rows).
    """

    codes: Tensor
    scales: Tensor
    format: BlockFormat
    rows: int
    cols: int
    dtype: torch.dtype
    transpose: bool = False

    def new_matrix(self) -> Tensor:
        """Room for the result, contiguous."""
        shape = (self.cols, self.rows) if self.transpose else (self.rows, self.cols)
        return torch.empty(shape, dtype=self.dtype, device=self.codes.device)


class Encoded(NamedTuple):
    """What a backend makes of a matrix (rows, cols).

    Attributes:
        codes: uint8, `BlockFormat.codes_shape`.
        scales: `BlockFormat.scales_shape`, as stored.
        tensor_scale: fp32, 0-dim, or `None` where the format has none.
        operand: codes × block scale, (rows, cols) in the dtype asked for, or `None`.
        counts: int64, one for each of `COUNT_NAMES`, or `None`.
        error: float64, one for each of `ERROR_NAMES`, or `None`.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    operand: Tensor | None = None
    counts: Tensor | None = None
    error: Tensor | None = None


def new_encoded(request: EncodeRequest) -> Encoded:
    """Room for what a kernel makes of a matrix, but for counts and error."""
    format, (rows, cols), device = request.encoding.format, request.x.shape, request.x.device
    codes = torch.empty(format.codes_shape(rows, cols), dtype=torch.uint8, device=device)
    scales = torch.empty(format.scales_shape(rows, cols), dtype=SCALE_DTYPES[format.scale], device=device)
    tensor_scale = operand = None
    if format.has_tensor_scale:
        tensor_scale = torch.empty((), dtype=torch.float32, device=device)
    if request.operand_dtype is not None:
        operand = torch.empty((rows, cols), dtype=request.operand_dtype, device=device)
    return Encoded(codes, scales, tensor_scale, operand)


def no_counts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and error of a tensor without elements."""
    return (
        torch.zeros(len(COUNT_NAMES), dtype=torch.int64, device=device),
        torch.zeros(len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def check_parts(codes: Tensor, scales: Tensor, format: BlockFormat, rows: int, cols: int) -> None:
    """Refuse codes and scales that are not those of a (rows, cols) matrix: a kernel would read past them.

    Raises:
        UserError: a dtype, shape or device does not fit.
    """
    for name, part, dtype, shape in (
        ("codes", codes, torch.uint8, format.codes_shape(rows, cols)),
        ("scales", scales, SCALE_DTYPES[format.scale], format.scales_shape(rows, cols)),
    ):
        if part.dtype != dtype or part.shape != shape:
            raise UserError(
                f"{name} of a {rows} × {cols} matrix in this format are {dtype} {tuple(shape)}, "
                f"not {part.dtype} {tuple(part.shape)}: pass the parts of one quantised tensor together"
            )
    if codes.device != scales.device:
        raise UserError(f"codes are on {codes.device}, scales on {scales.device}: move them to one device")
