"""The interface between quantizers and backends: encodings, requests, packed results and counts.

An `Encoding` is a block format and the way codes and scales are chosen. A request contains a matrix and all
options; to add an option, add a field.

Counts, with s an element's decoded scale and M the largest element:

- saturated: |x| > M·s, so x becomes ±M·s. upper_half: |x| > M/2·s. Both compare x · encode with a slack of
  2⁻²⁰, because fp32 rounding can raise a block's maximum above M.
- underflow: x ≠ 0, but its code or its block's scale is 0.
- nonfinite: x is an infinity or a NaN. Finite elements of its block become NaN too, but are not counted.
- blocks: number of blocks. saturated_scales: E4M3 scales above 448 before clamping (same slack), which
  requires a given `tensor_amax`, and scales beyond the range of UE5M3 or HiF4. zero_blocks: blocks whose
  scale is 0; for E8M0, HiF4 and signed scales, which have no 0, blocks whose elements are all 0.
- squared_error Σ(x - q)² and squared_norm Σx² exclude blocks with an infinity or a NaN, so they are finite.

Padding is not counted.
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

# MXFP4 as FP8 operands: an MXFP4 number is element · 2^e, with one e per block. Let e_max be the largest e of
# the blocks that contain more than zeros and NaN. With one power of two for the whole tensor, the number
# becomes element · 2^(e - e_max + SHIFT), which is an exact FP8 number if e ≥ e_max - DEPTH.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIFT = {E4M3: 6, E5M2: 13}  # 6 · 2^shift, 384 and 49152, is the largest number used
DEPTH = {E4M3: 14, E5M2: 28}  # how far below the largest exponent every element is exact
MANTISSA = {E4M3: 3, E5M2: 2}  # bits
BIAS = {E4M3: 7, E5M2: 15}
NO_EXPONENT = -256  # below every exponent code and its negative

SMALLEST_NORMAL = 2.0**-126  # of fp32
_FITTING = {
    "e4m3": ("nearest", "up"),
    "e8m0": ("down", "up"),
    "fp32": ("nearest",),
    "signed_fp32": ("nearest",),
    "ue5m3": ("nearest", "up"),
    "hif4": ("nearest", "up"),
}


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a quantizer chooses scales and codes.

    Attributes:
        format: format of the result.
        is_stochastic: whether elements are rounded stochastically.
        scale_rounding: how block scales are rounded to their format, see `formats.block_scale`.
        scale_from: the scale maps the largest ("amax") or the mean magnitude to the largest element, or
            is the power of two nearest to the scale with the smallest squared error for a Gaussian of the
            block's root mean square ("rms"; QuEST, arXiv:2502.05003). MXFP4 only.
        q_scalar: factor of that magnitude: above 1 leaves headroom, below 1 saturates on purpose.
        four_over_six: map the maximum of a block to 4 instead of 6 if that has the smaller error
            (arXiv:2512.02010). Stochastic rounding compares expected squared errors.
        four_over_six_max: E4M3 scale of the block with the largest maximum, mapped to 6. With 256 it can be
            mapped to 4 as well; with 448 its scale is limited to 448.
        is_eden: round elements to nearest, multiply the scale by the factor that makes the block's projection
            on x equal to x, and round the scale stochastically (MS-EDEN, arXiv:2601.22813). Unbiased over
            random Hadamard transforms, so it requires one that changes from draw to draw.
        is_power_of_two: round the tensor scale up to a power of two, which is exact as part of the operand;
            NVFP4 only, and the default of its names.
    """

    format: BlockFormat
    is_stochastic: bool = False
    scale_rounding: ScaleRounding = "nearest"
    scale_from: Literal["amax", "mean", "rms"] = "amax"
    q_scalar: float = 1.0
    four_over_six: bool = False
    four_over_six_max: float = 256.0
    is_eden: bool = False
    is_power_of_two: bool = False

    def __hash__(self) -> int:
        """Of few fields, because launchers look encodings up at each use of a layer."""
        return hash((self.format.scale, self.format.block, self.is_stochastic, self.scale_rounding))

    def __post_init__(self) -> None:
        fitting = _FITTING[self.format.scale]
        if self.scale_rounding not in fitting:
            raise UserError(
                f"{self.format.scale} block scales cannot be rounded {self.scale_rounding!r}: "
                f"choose {' or '.join(fitting)}"
            )
        if not SMALLEST_NORMAL <= ctypes.c_float(self.q_scalar).value < float("inf"):
            raise UserError(
                f"q_scalar must be a normal fp32 number above 0 (1.2e-38 to 3.4e38), not {self.q_scalar!r}"
            )
        if self.format.scale == "signed_fp32" and (self.q_scalar != 1 or self.scale_from != "amax"):
            raise UserError(
                "blocks of INT8 or E5M2 take their scale from their own maximum: leave q_scalar out"
            )
        if self.four_over_six and self.format.scale != "e4m3":
            raise UserError("four-over-six needs NVFP4, whose elements end with 4 and 6: use nvfp4…")
        if self.format.has_row_scales and not self.is_power_of_two:
            raise UserError("token_scale needs powers of two, which operands include: leave out fp32_scale")
        if self.is_power_of_two and self.format.scale != "e4m3":
            raise UserError(
                "is_power_of_two needs NVFP4, the only format with block scales and a tensor scale"
            )
        if self.scale_from == "rms" and (not self.format.is_mxfp4 or self.scale_rounding != "down"):
            raise UserError(
                'scale_from "rms" needs MXFP4 with scales rounded "down", after a factor: use mxfp4…:quest'
            )
        if self.is_eden and (self.format.scale != "e4m3" or self.format.block != (1, 16)):
            raise UserError("eden needs NVFP4 blocks of 1 × 16: leave out tile16, or use nvfp4")
        if self.is_eden and (self.scale_rounding != "nearest" or not self.is_stochastic):
            raise UserError("eden rounds scales stochastically and elements to nearest: leave unbiased out")

    @property
    def masks_gradient(self) -> bool:
        """Whether elements that it saturates get no gradient: a trust mask, as in QuEST."""
        return self.scale_from == "rms"

    @property
    def has_kernels(self) -> bool:
        """Whether kernels for the format compute this encoding; otherwise only `reference` does."""
        is_common = self.format.block == (1, 16) and not self.is_stochastic and self.four_over_six_max == 256
        return self.scale_from == "amax" and not self.is_eden and (is_common or not self.four_over_six)


class EncodeRequest(NamedTuple):
    """A matrix to quantise, with options.

    Attributes:
        x: floating-point (rows, cols), at least one element, any strides.
        encoding: format and rounding.
        random_key: key of the random numbers of stochastic rounding.
        signs: apply a Hadamard transform with these signs to the rows first; cols must be a multiple of 16.
        tensor_amax: fp32, 0-dim: use this as the tensor's largest magnitude.
        operand_dtype: also return the operand, in this dtype. With E4M3 or E5M2 (MXFP4 only) that is `fp8`
            of the result, and the exponents are returned too.
        with_counts: also return counts and error.
        with_exponents: also return the range of the blocks' exponents; MXFP4 only.
    """

    x: Tensor
    encoding: Encoding
    random_key: RandomKey = NO_KEY
    signs: int | None = None
    tensor_amax: Tensor | None = None
    operand_dtype: torch.dtype | None = None
    with_counts: bool = False
    with_exponents: bool = False

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """E4M3 or E5M2 if the operand is requested in one of them."""
        return self.operand_dtype if self.operand_dtype in SHIFT else None


class Fp8Operand(NamedTuple):
    """An MXFP4 matrix as FP8 numbers: numbers · scale is the decoded matrix, if its exponents fit.

    Attributes:
        numbers: contiguous, E4M3 or E5M2: (rows, cols), or (cols, rows) of the transpose.
        scale: a power of two, fp32, 0-dim.
    """

    numbers: Tensor
    scale: Tensor


class DecodeRequest(NamedTuple):
    """A packed matrix to decode, (rows, cols) without padding, or (cols, rows) with `transpose`.

    Codes and scales are those of `Encoded`; `dtype` is that of the result. `tensor_scale` (fp32, a
    power of two, `BlockFormat.tensor_scale_shape`) multiplies it; only E4M3 scales have one.
    """

    codes: Tensor
    scales: Tensor
    format: BlockFormat
    rows: int
    cols: int
    dtype: torch.dtype
    transpose: bool = False
    tensor_scale: Tensor | None = None

    @property
    def without_tensors(self) -> tuple[BlockFormat, int, int, torch.dtype, bool]:
        """All but codes and scales, for arguments that are kept."""
        return self.format, self.rows, self.cols, self.dtype, self.transpose

    def new_matrix(self) -> Tensor:
        """An uninitialised, contiguous matrix for the result."""
        shape = (self.cols, self.rows) if self.transpose else (self.rows, self.cols)
        return torch.empty(shape, dtype=self.dtype, device=self.codes.device)


class Encoded(NamedTuple):
    """The result of quantising a matrix (rows, cols).

    Attributes:
        codes: uint8, `BlockFormat.codes_shape`.
        scales: `BlockFormat.scales_shape`, as stored.
        tensor_scale: fp32, `BlockFormat.tensor_scale_shape`, or `None` if the format has none.
        operand: codes × block scale (× tensor scale with `is_power_of_two`), (rows, cols) in the requested
            dtype, or `None`.
        counts: int64, one for each of `COUNT_NAMES`, or `None`.
        error: float64, one for each of `ERROR_NAMES`, or `None`.
        exponents: int32 (2,): the highest exponent code of the blocks that have an element besides 0 and NaN,
            and the lowest one, negated; `NO_EXPONENT` twice if there is no such block. Or `None`. (Both are
            maxima, so the programs of a kernel can raise them.)
        fp8: the operand in FP8, or `None`.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    operand: Tensor | None = None
    counts: Tensor | None = None
    error: Tensor | None = None
    exponents: Tensor | None = None
    fp8: Fp8Operand | None = None


class EncodedShapes(NamedTuple):
    """Shapes of the tensors of an `Encoded`, and the dtype of its scales."""

    codes: tuple[int, int]
    scales: tuple[int, int]
    scale_dtype: torch.dtype
    tensor_scale: tuple[int, ...] | None

    @classmethod
    def of(cls, format: BlockFormat, rows: int, cols: int) -> EncodedShapes:
        """The shapes of a matrix in this format."""
        codes, scales = format.codes_shape(rows, cols), format.scales_shape(rows, cols)
        return cls(codes, scales, SCALE_DTYPES[format.scale], format.tensor_scale_shape(rows))


def new_encoded(request: EncodeRequest, shapes: EncodedShapes | None = None) -> Encoded:
    """Uninitialised tensors for the result of a kernel, without counts and error.

    `shapes` are those of the request, for a caller that has kept them.
    """
    x = request.x
    device, kept = x.device, shapes or EncodedShapes.of(request.encoding.format, *x.shape)
    codes = torch.empty(kept.codes, dtype=torch.uint8, device=device)
    scales = torch.empty(kept.scales, dtype=kept.scale_dtype, device=device)
    tensor_scale = operand = None
    if kept.tensor_scale is not None:
        tensor_scale = torch.empty(kept.tensor_scale, dtype=torch.float32, device=device)
    if request.operand_dtype is not None and request.fp8_dtype is None:
        operand = torch.empty(x.shape, dtype=request.operand_dtype, device=device)
    return Encoded(codes, scales, tensor_scale, operand)


def no_exponents(device: torch.device) -> Tensor:
    """The exponents of a matrix without blocks that count."""
    return torch.full((2,), NO_EXPONENT, dtype=torch.int32, device=device)


def no_counts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and error of an empty tensor: zeros."""
    return (
        torch.zeros(len(COUNT_NAMES), dtype=torch.int64, device=device),
        torch.zeros(len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def check_parts(codes: Tensor, scales: Tensor, format: BlockFormat, rows: int, cols: int) -> None:
    """Raise if codes and scales do not belong to a (rows, cols) matrix; a kernel would read out of bounds.

    Raises:
        UserError: a dtype, shape or device is wrong.
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
