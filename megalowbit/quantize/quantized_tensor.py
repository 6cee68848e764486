"""Results of quantizers: packed codes with their scales, or an unpacked tensor.

A GEMM takes `operand()`: element × block scale, and × tensor scale if that is a power of two. For E2M1 with
E4M3 scales this number has at most six significant bits, with E8M0 scales two, so it is exact in bf16.
(Exception: with an MXFP4 scale rounded up to 2¹²⁶, numbers from 3.5 · 2¹²⁶ become 2¹²⁸, which is infinite. So
do, with power-of-two tensor scales, some numbers from 1.875 · 2¹²⁷.) A bf16 GEMM therefore computes the same
as FP4 tensor cores would. Other tensor scales (`operand_scale`) are applied to the result, in fp32. Only
formats with fp32 block scales need fp32 operands (`exact_dtype`), except mixed blocks: their operand has the
range of the original tensor, and rounding it to half precision adds at most a tenth to its squared error in
bf16, and a thousandth in fp16.

For backward, a tensor is stored as its parts (4.5 bits per element for NVFP4). `to_parts` separates the
tensors, which autograd must save, from the other fields; `from_parts` joins them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalowbit.formats.block_format import GROUP, BlockFormat
from megalowbit.formats.block_scale import decode_scales
from megalowbit.formats.codes import pack_codes, unpack_codes
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import DecodeRequest, Fp8Operand
from megalowbit.quantize.hadamard import hadamard, inverse_hadamard


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, cols) of a tensor flattened to two dimensions; a vector is one row, a number is 1 × 1."""
    cols = shape[-1] if len(shape) else 1
    return math.prod(shape[:-1]), cols


def mask_bytes(cols: int) -> int:
    """Bytes of a row of `QuantizedTensor.range_mask`."""
    return -(-cols // GROUP) * (GROUP // 8)


def masked(gradient: Tensor, mask: Tensor, signs: int | None) -> Tensor:
    """A gradient (rows, cols) without the elements that `QuantizedTensor.range_mask` excludes.

    The mask applies to elements of the transformed tensor, if `signs` is given. Infinities and NaN stay.
    """
    padded = _whole_groups(gradient)
    turned = padded if signs is None else hadamard(padded, signs)
    kept = turned * unpack_codes(mask, 1)
    return (kept if signs is None else inverse_hadamard(kept, signs))[:, : gradient.shape[1]]


def _whole_groups(matrix: Tensor) -> Tensor:
    missing = -matrix.shape[1] % GROUP
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix


def _described(tensor: QuantizedTensor | UnquantizedTensor) -> str:
    return f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


class Operand(Protocol):
    """The interface of both tensor classes below that GEMMs use."""

    @property
    def operand_scale(self) -> Tensor | None:
        """Factor to apply to the GEMM's result; `None` is 1."""

    @property
    def exact_dtype(self) -> torch.dtype | None:
        """The narrowest dtype that represents the operand exactly; `None`: it is not quantised.

        fp16 is returned for mixed blocks, whose operand may be rounded to any half precision.
        """

    def operand(self, dtype: torch.dtype = ..., *, transpose: bool = ...) -> Tensor:
        """The 2-D matrix to multiply, without `operand_scale`."""


NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")  # in place of tensors that are elsewhere


@dataclass(kw_only=True, eq=False, repr=False)  # frozen, it would take twice as long to make
class QuantizedTensor:
    """A tensor in a block format.

    Attributes:
        codes: uint8, `format.codes_shape(rows, cols)`, the first code in the lowest bits.
        scales: `format.scales_shape(rows, cols)`, as stored; NaN marks a block with non-finite elements.
        tensor_scale: fp32, the decoding factor, 0-dim, or (rows, 1) if each row has its own; `None` if the
            format has none.
        shape: shape of the original tensor.
        dtype: dtype of the original tensor.
        format: format of codes and scales.
        is_power_of_two: whether the tensor scale is one from 2⁻¹¹⁶ on; `operand` then includes it.
        counts: int64, one for each of `COUNT_NAMES`, or `None` if not requested.
        error: float64, one for each of `ERROR_NAMES`, or `None`.
        ready_operand: the operand, if the quantizer has already computed it; never saved.
        exponents: range of an MXFP4 tensor's block exponents, see `Encoded`; `None` if not requested.
        fp8: an MXFP4 operand in FP8, if the quantizer has already computed it; never saved.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    format: BlockFormat
    is_power_of_two: bool = False
    counts: Tensor | None = None
    error: Tensor | None = None
    ready_operand: Tensor | None = None
    exponents: Tensor | None = None
    fp8: Fp8Operand | None = None

    def __repr__(self) -> str:
        bits = f"{self.format.bits_per_element:g} bits an element"
        return f"QuantizedTensor({_described(self)}, {self.format}, {bits})"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and tensor scale."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.tensor_scale) if part is not None)

    @property
    def operand_scale(self) -> Tensor | None:
        """The tensor scale if `operand` does not include it."""
        return None if self.is_power_of_two else self.tensor_scale

    @property
    def exact_dtype(self) -> torch.dtype:
        """See `Operand.exact_dtype`."""
        if self.format.scale == "signed_fp32":
            return torch.float16
        has_wide_scales = self.format.scale == "fp32" and self.format.block is not None
        return torch.float32 if has_wide_scales else torch.bfloat16

    def operand(self, dtype: torch.dtype = torch.bfloat16, *, transpose: bool = False) -> Tensor:
        """The matrix to multiply, (rows, cols), or (cols, rows) if transposed.

        It is codes × block scale, and × tensor scale if that is a power of two; exact in `exact_dtype` and
        wider. The operand of mixed blocks is rounded once, to `dtype`.
        """
        if self.ready_operand is not None and self.ready_operand.dtype == dtype:
            return self.ready_operand.t() if transpose else self.ready_operand
        rows, cols = matrix_shape(self.shape)
        folded = self.tensor_scale if self.is_power_of_two else None
        return backends.decode(
            DecodeRequest(self.codes, self.scales, self.format, rows, cols, dtype, transpose, folded)
        )

    def dequantize(self) -> Tensor:
        """The tensor in its original shape and dtype: element · block scale · tensor scale, in fp32."""
        values = self.operand(torch.float32)
        if self.operand_scale is not None:
            values = values * self.operand_scale
        # numbers near the dtype's largest may round beyond it, although the input was finite
        largest = min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)
        return values.clamp(-largest, largest).to(self.dtype).reshape(self.shape)

    def range_mask(self, x: Tensor, signs: int | None) -> Tensor:
        """Which elements of the quantised tensor were not saturated: |element| < M · scale.

        Only for formats whose scale is that of a part of a row, without a tensor scale.

        Args:
            x: the tensor before it was quantised, in this tensor's shape.
            signs: of the Hadamard transform of its rows before it was quantised; `None`: there was none.

        Returns:
            uint8 (rows, `mask_bytes(cols)`): one bit for each element of the transformed matrix, padded to a
            multiple of 16 columns.
        """
        assert self.format.block is not None  # see above
        assert self.format.block[0] == 1
        assert self.tensor_scale is None
        matrix = _whole_groups(x.reshape(matrix_shape(x.shape)).to(torch.float32))
        if signs is not None:
            matrix = hadamard(matrix, signs)
        scales = decode_scales(self.scales).repeat_interleave(self.format.block[1], 1)
        limits = scales[:, : matrix.shape[1]] * self.format.element.max
        return pack_codes((matrix.abs() < limits).to(torch.uint8), 1)

    def to_parts(self) -> tuple[tuple[Tensor, ...], QuantizedTensor]:
        """The tensors (codes, scales, tensor scale, exponents), and a copy of this object without them."""
        parts = [self.codes, self.scales]
        tensor_scale = exponents = None
        if self.tensor_scale is not None:
            parts.append(self.tensor_scale)
            tensor_scale = NOTHING
        if self.exponents is not None:
            parts.append(self.exponents)
            exponents = NOTHING
        return tuple(parts), self._with(NOTHING, NOTHING, tensor_scale, exponents)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> QuantizedTensor:
        """Inverse of `to_parts`; call it on the second result of that."""
        codes, scales, *others = tensors
        rest = iter(others)
        tensor_scale = None if self.tensor_scale is None else next(rest)
        exponents = None if self.exponents is None else next(rest)
        return self._with(codes, scales, tensor_scale, exponents)

    def packed(self) -> QuantizedTensor:
        """A copy without counts and operands."""
        return self._with(self.codes, self.scales, self.tensor_scale, self.exponents)

    def _with(
        self, codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, exponents: Tensor | None
    ) -> QuantizedTensor:
        """These tensors in place of all; `dataclasses.replace` would take several times as long."""
        return QuantizedTensor(
            codes=codes,
            scales=scales,
            tensor_scale=tensor_scale,
            shape=self.shape,
            dtype=self.dtype,
            format=self.format,
            is_power_of_two=self.is_power_of_two,
            exponents=exponents,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class UnquantizedTensor:
    """A tensor that is not packed, rounded or not; same interface as `QuantizedTensor`."""

    values: Tensor
    counts: Tensor | None = None
    error: Tensor | None = None

    codes = None
    scales = None
    tensor_scale = None
    operand_scale = None
    exact_dtype = None

    def __repr__(self) -> str:
        return f"UnquantizedTensor({_described(self)})"

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.values.nbytes

    def operand(self, dtype: torch.dtype | None = None, *, transpose: bool = False) -> Tensor:
        """The tensor as a matrix, (rows, cols), cast to `dtype` (default: its own)."""
        matrix = self.values.reshape(matrix_shape(self.values.shape)).to(dtype or self.values.dtype)
        return matrix.t() if transpose else matrix

    def dequantize(self) -> Tensor:
        """The tensor itself."""
        return self.values

    def to_parts(self) -> tuple[tuple[Tensor, ...], UnquantizedTensor]:
        """As `QuantizedTensor.to_parts`."""
        nothing = torch.empty(0, dtype=self.dtype, device="cpu")
        return (self.values,), UnquantizedTensor(values=nothing)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> UnquantizedTensor:
        """As `QuantizedTensor.from_parts`."""
        return UnquantizedTensor(values=tensors[0])

    def packed(self) -> UnquantizedTensor:
        """As `QuantizedTensor.packed`."""
        return UnquantizedTensor(values=self.values)
