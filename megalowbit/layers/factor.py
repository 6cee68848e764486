"""One operand of a layer's products, with what the products want to know of it.

A factor's matrix may be stored transposed: blocks lie along the last axis of what is stored, and where each
product is quantised for itself (`layout="per_gemm"`) that axis is the one the product sums over. For backward
a factor is kept as its parts, as a quantised tensor is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer

OperandTensor = QuantizedTensor | UnquantizedTensor


@dataclass(frozen=True, kw_only=True)
class ExponentRange:
    """Exponents of a tensor's blocks that are not all zero, as E8M0 codes; an empty tensor has none."""

    lowest: int
    highest: int


@dataclass(eq=False)
class Factor:
    """An operand.

    Attributes:
        tensor: quantised, or as it is.
        is_transposed: whether the matrix stored is the transpose of the tensor it stands for.
        exponents: range of its block exponents, once somebody has asked (`fp8_product.measure`).
    """

    tensor: OperandTensor
    is_transposed: bool = False
    exponents: ExponentRange | None = None

    def to_parts(self) -> tuple[tuple[Tensor, ...], Factor]:
        """Tensors, and a copy of the rest that holds none."""
        parts, rest = self.tensor.to_parts()
        return parts, replace(self, tensor=rest)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> Factor:
        """Inverse of `to_parts`, called on its second result."""
        return replace(self, tensor=self.tensor.from_parts(tensors))

    def packed(self) -> Factor:
        """Without what only the present product needs: counts, and the operand made on the way."""
        parts, rest = self.to_parts()
        return rest.from_parts(parts)


def is_block_quantizer(name: str) -> bool:
    """Whether a quantiser packs blocks (and can do so along the other axis, or after a transform)."""
    return isinstance(quantizer(name), BlockQuantizer)


@functools.lru_cache(maxsize=256)
def exact_dtype(name: str) -> torch.dtype | None:
    """The narrowest dtype that holds a quantiser's operands exactly; `None` where it packs nothing."""
    if not is_block_quantizer(name):
        return None
    return quantizer(name).quantize(torch.zeros(0, 16, dtype=torch.float32, device="cpu")).exact_dtype


def serves_both_axes(name: str) -> bool:
    """Whether a quantiser gives a transposed matrix the transposed codes: square blocks, or one scale."""
    chosen = quantizer(name)
    if chosen.is_identity:
        return True
    if not isinstance(chosen, BlockQuantizer):
        return False
    block = chosen.encoding.format.block
    return block is None or block[0] == block[1]


def transposed_values(x: Tensor) -> UnquantizedTensor:
    """xᵀ of any tensor taken as a matrix (rows, cols), as it is."""
    return UnquantizedTensor(values=x.detach().reshape(matrix_shape(x.shape)).t())
