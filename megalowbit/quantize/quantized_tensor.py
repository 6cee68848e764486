"""What a quantiser returns: packed codes with their scales, or the tensor itself where nothing is quantised.

A GEMM takes `operand()`: element codes times block scale, without the tensor's scale. Such a product has at
most six significant bits between 2⁻¹⁰ and 2688, so bf16 and fp16 hold it exactly, and a bf16 GEMM computes
what FP4 tensor cores would; the product of the two tensor scales is applied to the result, in fp32.

For backward a tensor is kept as its parts (4.5 bits an element): `to_parts` and `from_parts`, tensors on
one side, because autograd must hold them, and the rest on the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megalowbit.formats.block_scale import BLOCK_SIZE, decode_e4m3
from megalowbit.formats.element import ElementFormat
from megalowbit.formats.packing import in_pieces, unpack_values


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, cols) of a tensor flattened to two dimensions; a vector is one row, a number is 1 × 1."""
    cols = shape[-1] if len(shape) else 1
    return math.prod(shape[:-1]), cols


class Operand(Protocol):
    """What a GEMM needs of either kind of tensor below."""

    @property
    def tensor_scale(self) -> Tensor | None:
        """Factor the GEMM's result is to be multiplied by; `None` is 1."""

    def operand(self, dtype: torch.dtype = ...) -> Tensor:
        """The 2-D matrix to multiply, without `tensor_scale`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A tensor in a block format.

    Attributes:
        codes: uint8 (rows, padded cols / 2), two codes a byte, low nibble first.
        scales: float8_e4m3fn (rows, padded cols / 16); NaN marks a block with non-finite elements.
        tensor_scale: fp32, 0-dim, the decode factor.
        shape: of the original tensor.
        dtype: of the original tensor.
        element: format of the codes.
        counts: int64, one for each of `COUNT_NAMES`, or `None` if not asked for.
        error: float64, one for each of `ERROR_NAMES`, or `None`.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    shape: torch.Size
    dtype: torch.dtype
    element: ElementFormat
    counts: Tensor | None = None
    error: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, block scales and the tensor's scale."""
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scale.nbytes

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Codes × block scale, (rows, cols), exact in bf16, fp16 and anything wider."""
        rows, cols = matrix_shape(self.shape)
        scales = decode_e4m3(self.scales.view(-1, 1))
        values = torch.empty((scales.shape[0], BLOCK_SIZE), dtype=dtype, device=scales.device)
        if values.numel():
            pieces = in_pieces(len(scales), scales.device, values, self.codes.view(-1), scales)
            for out, codes, scale in pieces:
                out.copy_(unpack_values(codes, self.element).view(-1, BLOCK_SIZE).mul_(scale))
        return values.view(rows, self.scales.shape[1] * BLOCK_SIZE)[:, :cols]

    def dequantize(self) -> Tensor:
        """The tensor in its original shape and dtype: element · block scale · tensor scale, in fp32."""
        largest = torch.finfo(torch.float32).max
        # Decoding the largest fp32 number may round one step beyond it; that is no overflow of the input's.
        values = self.operand(torch.float32).mul(self.tensor_scale).clamp_(-largest, largest)
        return values.to(self.dtype).reshape(self.shape)

    def to_parts(self) -> tuple[tuple[Tensor, ...], QuantizedTensor]:
        """Tensors, and a copy of the rest that holds none."""
        nothing = torch.empty(0)
        rest = replace(self, codes=nothing, scales=nothing, tensor_scale=nothing, counts=None, error=None)
        return (self.codes, self.scales, self.tensor_scale), rest

    def from_parts(self, tensors: tuple[Tensor, ...]) -> QuantizedTensor:
        """Inverse of `to_parts`, called on its second result."""
        codes, scales, tensor_scale = tensors
        return replace(self, codes=codes, scales=scales, tensor_scale=tensor_scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnquantizedTensor:
    """A tensor that passed through the identity quantiser; the same surface as `QuantizedTensor`."""

    values: Tensor
    counts: Tensor | None = None
    error: Tensor | None = None

    codes = None
    scales = None
    tensor_scale = None

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

    def operand(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as a matrix, (rows, cols), cast to `dtype` (default: its own)."""
        return self.values.reshape(matrix_shape(self.values.shape)).to(dtype or self.values.dtype)

    def dequantize(self) -> Tensor:
        """The tensor itself."""
        return self.values

    def to_parts(self) -> tuple[tuple[Tensor, ...], UnquantizedTensor]:
        """As `QuantizedTensor.to_parts`."""
        return (self.values,), replace(self, values=torch.empty(0), counts=None, error=None)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> UnquantizedTensor:
        """As `QuantizedTensor.from_parts`."""
        return replace(self, values=tensors[0])
