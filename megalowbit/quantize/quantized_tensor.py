"""What a quantizer returns: packed codes with their scales, or the tensor itself where nothing is packed.

A GEMM takes `operand()`: element codes times block scale, without the tensor's scale. For E2M1 under E4M3
scales such a product has at most six significant bits between 2⁻¹⁰ and 2688, under E8M0 scales two, so bf16
holds it exactly (but what an MXFP4 scale rounded up to 2¹²⁶ makes of numbers from 3.5 · 2¹²⁶ on: 2¹²⁸ is
infinite) and a bf16 GEMM computes what FP4 tensor cores would; the product of the two tensor scales is
applied to the result, in fp32. Only formats with fp32 block scales need fp32 operands (`exact_dtype`), but
for blocks of INT8 or E5M2: their operand has the range of the tensor itself, and rounding it to half
precision adds at most a tenth to its squared error (bf16; fp16 a thousandth), so any will do.

For backward a tensor is kept as its parts (4.5 bits an element): `to_parts` and `from_parts`, tensors on
one side, because autograd must hold them, and the rest on the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megalowbit.formats.block_format import BlockFormat
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import DecodeRequest


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, cols) of a tensor flattened to two dimensions; a vector is one row, a number is 1 × 1."""
    cols = shape[-1] if len(shape) else 1
    return math.prod(shape[:-1]), cols


def _described(tensor: QuantizedTensor | UnquantizedTensor) -> str:
    return f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


class Operand(Protocol):
    """What a GEMM needs of either kind of tensor below."""

    @property
    def tensor_scale(self) -> Tensor | None:
        """Factor the GEMM's result is to be multiplied by; `None` is 1."""

    @property
    def exact_dtype(self) -> torch.dtype | None:
        """The narrowest dtype that holds the operand exactly; `None`: it is not quantised.

        fp16 stands for an operand with the range of the tensor it was made from, which any half precision
        holds well enough.
        """

    def operand(self, dtype: torch.dtype = ..., *, transpose: bool = ...) -> Tensor:
        """The 2-D matrix to multiply, without `tensor_scale`."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizedTensor:
    """A tensor in a block format.

    Attributes:
        codes: uint8, `format.codes_shape(rows, cols)`, the first code in the lowest bits.
        scales: `format.scales_shape(rows, cols)`, as stored; NaN marks a block with non-finite elements.
        tensor_scale: fp32, 0-dim, the decode factor, or `None` where the format has none.
        shape: of the original tensor.
        dtype: of the original tensor.
        format: of codes and scales.
        counts: int64, one for each of `COUNT_NAMES`, or `None` if not asked for.
        error: float64, one for each of `ERROR_NAMES`, or `None`.
        ready_operand: the operand, where the quantizer has made it on the way; never saved.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    format: BlockFormat
    counts: Tensor | None = None
    error: Tensor | None = None
    ready_operand: Tensor | None = None

    def __repr__(self) -> str:
        bits = f"{self.format.bits_per_element:g} bits an element"
        return f"QuantizedTensor({_described(self)}, {self.format}, {bits})"

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, block scales and the tensor's scale."""
        return sum(part.nbytes for part in self._parts())

    @property
    def exact_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds the operand exactly, or fp16, see `Operand`."""
        if self.format.scale == "signed_fp32":
            return torch.float16
        has_wide_scales = self.format.scale == "fp32" and self.format.block is not None
        return torch.float32 if has_wide_scales else torch.bfloat16

    def operand(self, dtype: torch.dtype = torch.bfloat16, *, transpose: bool = False) -> Tensor:
        """Codes × block scale, (rows, cols), exact in `exact_dtype` and wider; (cols, rows) transposed.

        Of blocks of INT8 or E5M2 rounded once, to `dtype`.
        """
        if self.ready_operand is not None and self.ready_operand.dtype == dtype:
            return self.ready_operand.t() if transpose else self.ready_operand
        rows, cols = matrix_shape(self.shape)
        return backends.decode(
            DecodeRequest(self.codes, self.scales, self.format, rows, cols, dtype, transpose)
        )

    def dequantize(self) -> Tensor:
        """The tensor in its original shape and dtype: element · block scale · tensor scale, in fp32."""
        values = self.operand(torch.float32)
        if self.tensor_scale is not None:
            values = values * self.tensor_scale
        # Numbers near the dtype's largest may round beyond it; that is no overflow of the input's.
        largest = min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)
        return values.clamp(-largest, largest).to(self.dtype).reshape(self.shape)

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales) + (() if self.tensor_scale is None else (self.tensor_scale,))

    def to_parts(self) -> tuple[tuple[Tensor, ...], QuantizedTensor]:
        """Tensors, and a copy of the rest that holds none."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        tensor_scale = None if self.tensor_scale is None else nothing
        rest = replace(
            self,
            codes=nothing,
            scales=nothing,
            tensor_scale=tensor_scale,
            counts=None,
            error=None,
            ready_operand=None,
        )
        return self._parts(), rest

    def from_parts(self, tensors: tuple[Tensor, ...]) -> QuantizedTensor:
        """Inverse of `to_parts`, called on its second result."""
        codes, scales, *tensor_scale = tensors
        return replace(
            self, codes=codes, scales=scales, tensor_scale=tensor_scale[0] if tensor_scale else None
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class UnquantizedTensor:
    """A tensor that is not packed: as it was, or rounded; the same surface as `QuantizedTensor`."""

    values: Tensor
    counts: Tensor | None = None
    error: Tensor | None = None

    codes = None
    scales = None
    tensor_scale = None
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
        return (self.values,), replace(self, values=nothing, counts=None, error=None)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> UnquantizedTensor:
        """As `QuantizedTensor.from_parts`."""
        return replace(self, values=tensors[0])
