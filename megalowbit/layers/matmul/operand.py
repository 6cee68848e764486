"""One operand of a layer's products, and how it is kept for backward.

The matrix is stored row-major, with blocks along its last axis: (rows, cols) of the tensor flattened to two
axes, or its transpose (cols, rows) if `is_transposed`. With the layout "per_gemm" the last axis is always the
one that the product sums over.

A split operand consists of a residual, which is the stored matrix, and a low-rank part, which is never
transposed. For backward an operand is taken apart into tensors, which autograd saves, and a description
without tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import NOTHING, QuantizedTensor, UnquantizedTensor, matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.spectral.split import right_factor, scaled_left

OperandTensor = QuantizedTensor | UnquantizedTensor


@dataclass(frozen=True, eq=False)
class LowRankPart:
    """The low-rank part of a split operand M = gain · residual + U·diag(values)·Vᵀ.

    Attributes:
        left: Uᵀ (k, rows), row-major: each direction is contiguous and has its own blocks.
        values: (k,) fp32 or fp64: singular values, including the recipe's gains.
        right: Vᵀ (k, cols), row-major.
        gain: factor of the residual, 0-dim; `None` is 1.
        is_row: whether U·diag(values) is a column of ones, so every row of the low-rank part is Vᵀ.
        ready: what `matrices` returns without `transpose`, if it is known already; never saved.
    """

    left: OperandTensor
    values: Tensor
    right: OperandTensor
    gain: Tensor | None = None
    is_row: bool = False
    ready: tuple[Tensor, Tensor] | None = None

    def matrices(self, dtype: torch.dtype, *, transpose: bool) -> tuple[Tensor, Tensor]:
        """(rows, k) and (k, cols), whose product is U·diag(values)·Vᵀ; with `transpose`, of its transpose.

        In both cases U·diag(values) is rounded to `dtype` as one matrix, exactly as when the residual was
        computed.
        """
        if self.ready is not None and self.ready[0].dtype == dtype:
            left, right = self.ready
        else:
            left, right = scaled_left(self.left, self.values, dtype), right_factor(self.right, dtype)
        return (right.t(), left.t()) if transpose else (left, right)

    def to_parts(self) -> tuple[tuple[Tensor, ...], LowRankPart]:
        """See `MatmulOperand.to_parts`."""
        left, rest_left = self.left.to_parts()
        right, rest_right = self.right.to_parts()
        nothing = self.values.new_empty(0, device="cpu")
        gain = () if self.gain is None else (self.gain,)
        rest = LowRankPart(
            rest_left, nothing, rest_right, None if self.gain is None else nothing, self.is_row
        )
        return (*left, *right, self.values, *gain), rest

    def from_parts(self, tensors: tuple[Tensor, ...]) -> LowRankPart:
        """See `MatmulOperand.from_parts`."""
        gain = None
        if self.gain is not None:
            *tensors, gain = tensors  # type: ignore[assignment]
        *factors, values = tensors
        count = len(self.left.to_parts()[0])
        left, right = tuple(factors[:count]), tuple(factors[count:])
        return replace(
            self,
            left=self.left.from_parts(left),
            values=values,
            right=self.right.from_parts(right),
            gain=gain,
        )


@dataclass(eq=False)
class MatmulOperand:
    """An operand, quantised or not.

    Attributes:
        tensor: quantised, or the values themselves; for a split operand, its residual.
        is_transposed: whether the stored matrix is the transpose of the original tensor.
        low_rank: the low-rank part of a split operand, never transposed.
        gradient_mask: of an operand kept for backward, `QuantizedTensor.range_mask` of the other operand in
            `output`, whose gradient is computed with this one; `None`: nothing is excluded. An operand has no
            low-rank part beside it.
    """

    tensor: OperandTensor
    is_transposed: bool = False
    low_rank: LowRankPart | None = None
    gradient_mask: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        tensor = self.tensor
        return tensor.values.device if isinstance(tensor, UnquantizedTensor) else tensor.codes.device

    def decoded(self, dtype: torch.dtype) -> MatmulOperand:
        """A copy with the GEMM's operand decoded, for use in several products."""
        if isinstance(self.tensor, UnquantizedTensor):
            return self
        return replace(self, tensor=replace(self.tensor, ready_operand=self.tensor.operand(dtype)))

    def to_parts(self) -> tuple[tuple[Tensor, ...], MatmulOperand]:
        """The operand's tensors, and a copy without tensors."""
        parts, rest = self.tensor.to_parts()
        if self.gradient_mask is not None:
            return (*parts, self.gradient_mask), MatmulOperand(
                rest, self.is_transposed, gradient_mask=NOTHING
            )
        if self.low_rank is None:
            return parts, MatmulOperand(rest, self.is_transposed)
        further, low_rank = self.low_rank.to_parts()
        return (*parts, *further), replace(self, tensor=rest, low_rank=low_rank)

    def from_parts(self, tensors: tuple[Tensor, ...]) -> MatmulOperand:
        """Inverse of `to_parts`; call it on the second result."""
        if self.gradient_mask is not None:
            *tensors, mask = tensors  # type: ignore[assignment]
            tensor = self.tensor.from_parts(tuple(tensors))
            return MatmulOperand(tensor, self.is_transposed, gradient_mask=mask)
        if self.low_rank is None:
            return MatmulOperand(self.tensor.from_parts(tensors), self.is_transposed)
        count = len(self.tensor.to_parts()[0])
        return replace(
            self,
            tensor=self.tensor.from_parts(tensors[:count]),
            low_rank=self.low_rank.from_parts(tensors[count:]),
        )

    def packed(self) -> MatmulOperand:
        """A copy without counts and decoded operand, which only the current product needs."""
        if self.low_rank is None and self.gradient_mask is None:
            return MatmulOperand(self.tensor.packed(), self.is_transposed)
        parts, rest = self.to_parts()
        return rest.from_parts(parts)


def save_operands(ctx: Any, *operands: MatmulOperand | None, others: Sequence[Tensor] = ()) -> None:
    """Save operands (or `None`) and further tensors in an autograd context."""
    tensors: list[Tensor] = []
    ctx.operands = []  # for each operand: its description and number of tensors
    for operand in operands:
        parts, rest = ((), None) if operand is None else operand.to_parts()
        tensors += parts
        ctx.operands.append((rest, len(parts)))
    ctx.save_for_backward(*tensors, *others)


def restore_operands(ctx: Any) -> tuple[list[MatmulOperand | None], list[Tensor]]:
    """Inverse of `save_operands`, in backward: the operands, and the further tensors."""
    tensors = list(ctx.saved_tensors)
    restored: list[MatmulOperand | None] = []
    for rest, count in ctx.operands:
        restored.append(None if rest is None else rest.from_parts(tuple(tensors[:count])))
        del tensors[:count]
    return restored, tensors


@functools.lru_cache(maxsize=256)
def exact_dtype(name: str) -> torch.dtype | None:
    """The narrowest dtype that holds a quantizer's decoded operands exactly; `None` if it packs nothing."""
    chosen = quantizer(name)
    if not isinstance(chosen, BlockQuantizer):
        return None
    return chosen.quantize(torch.zeros(0, 16, dtype=torch.float32, device="cpu")).exact_dtype


def transposed_values(x: Tensor) -> UnquantizedTensor:
    """xᵀ (cols, rows) of a tensor flattened to (rows, cols), not quantised; a view if possible."""
    return UnquantizedTensor(values=x.detach().reshape(matrix_shape(x.shape)).t())
