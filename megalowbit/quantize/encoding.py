"""An encoding: a block format and how numbers get into it; and the check of what it made."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.formats.block_format import SCALE_DTYPES, BlockFormat
from megalowbit.formats.block_scale import ScaleRounding

SMALLEST_NORMAL = 2.0**-126  # of fp32
_FITTING = {
    "e4m3": ("nearest", "up"),
    "e8m0": ("down", "up"),
    "fp32": ("nearest",),
    "signed_fp32": ("nearest",),
}


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a quantiser chooses scales and codes.

    Attributes:
        format: of the result.
        is_stochastic: whether elements are rounded stochastically.
        is_unbiased: whether that goes by 23 random bits an element instead of 8, see `formats.rounding`.
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


class Encoded(NamedTuple):
    """What a backend makes of a matrix (rows, cols).

    Attributes:
        codes: uint8, `BlockFormat.codes_shape`.
        scales: `BlockFormat.scales_shape`, as stored.
        tensor_scale: fp32, 0-dim, or `None` where the format has none.
        operand: codes × block scale, (rows, cols) in the dtype asked for, or `None`.
        counts: int64 (8,), or `None`.
        error: float64 (2,), or `None`.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    operand: Tensor | None = None
    counts: Tensor | None = None
    error: Tensor | None = None


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
