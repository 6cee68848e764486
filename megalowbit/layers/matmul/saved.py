"""The tensors that forward keeps for backward, as a flat list with known number and shapes.

A compiled graph is traced on fake tensors, so the shape of each returned tensor must follow from the recipe
and the shapes of input and weight alone. For a quantised operand of matrix shape (rows, cols) the list holds

    codes          uint8, (rows, packed cols)    two 4-bit codes a byte, or one 8-bit code
    scales         (rows, blocks); (row tiles, column tiles) for square blocks; (0, 0) without blocks
    tensor scale   fp32, 0-dim, if the format has one
    exponents      int32, (2,), of MXFP4 for products on FP8 tensor cores

a mask of the gradient, uint8, if the other operand is rounded by `quest`: see `MatmulOperand`;
and for a split operand also Uᵀ (k, rows), Vᵀ (k, cols), the singular values (k,) and the gain (0-dim), if
any. An operand stored transposed has (cols, rows) here; the axis of its blocks is padded to whole Hadamard
groups if it is transformed.

A `Template` describes one operand: `empty_parts` makes the list for the tracer, `parts_of` the real one, and
`filled` restores the operand in backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.layers.matmul.operand import LowRankPart, MatmulOperand, OperandTensor
from megalowbit.layers.matmul.quantizations import Quantizations, needs_exponents
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.hadamard import GROUP
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import NO_KEY
from megalowbit.quantize.quantized_tensor import NOTHING, UnquantizedTensor, mask_bytes
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import split
from megalowbit.spectral.state import SplitState

SAMPLE_SIZE = 16
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class Template(NamedTuple):
    """Description of a kept operand.

    Attributes:
        operand: the operand, with placeholders for its tensors.
        shapes: shape and dtype of each tensor; sizes may be symbolic.
    """

    operand: MatmulOperand
    shapes: Shapes

    def empty_parts(self, like: Tensor) -> list[Tensor]:
        """Uninitialised tensors of these shapes on the device of `like`."""
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self.shapes]

    def filled(self, parts: list[Tensor]) -> tuple[MatmulOperand, list[Tensor]]:
        """Inverse of `parts_of`: the operand, and the remaining tensors of `parts`."""
        count = len(self.shapes)
        return self.operand.from_parts(tuple(parts[:count])), parts[count:]


def template(
    recipe: Recipe,
    operand: str,
    sizes: tuple[int, int],
    shape: Sequence[int],
    dtype: torch.dtype,
    other_shape: Sequence[int],
) -> Template:
    """The template of a layer's "input" or "weight".

    `sizes` are the layer's in_features and out_features, and `other_shape` is that of its other operand.
    """
    plan = Quantizations.of(recipe)
    kept = plan.backward_input if operand == "input" else plan.backward_weight
    rows, cols = math.prod(shape[:-1]), shape[-1]
    # (tokens, in_features) for the input, (out_features, in_features) for the weight; per_gemm stores the
    # transpose, whose last axis is padded to whole Hadamard groups.
    stored_rows = -(-rows // GROUP) * GROUP if kept.is_transformed else rows
    size = (cols, stored_rows) if kept.is_transposed else (rows, cols)
    with_exponents = needs_exponents(recipe, kept.name)
    tensor, shapes = _matrix(_sample(kept.name, dtype, with_exponents), size, dtype)
    if (plan.weight if operand == "input" else plan.input).masks_gradient:
        mask = math.prod(other_shape[:-1]), mask_bytes(other_shape[-1])
        return Template(
            MatmulOperand(tensor, kept.is_transposed, gradient_mask=NOTHING), [*shapes, (mask, torch.uint8)]
        )
    settings: OperandSplit | None = getattr(recipe, f"split_{operand}")
    low_rank = None
    if settings is not None and not kept.quantizer.is_identity:
        rank, sample = settings.rank_of(*sizes), _sample_low_rank(settings, dtype)
        left, left_shapes = _matrix(sample.left, (rank, rows), sample.left.dtype)
        right, right_shapes = _matrix(sample.right, (rank, cols), sample.right.dtype)
        low_rank = replace(sample, left=left, right=right)
        shapes += [*left_shapes, *right_shapes, ((rank,), sample.values.dtype)]
        if sample.gain is not None:
            shapes.append(((), sample.gain.dtype))
    return Template(MatmulOperand(tensor, kept.is_transposed, low_rank=low_rank), shapes)


def _matrix(sample: OperandTensor, size: tuple[int, int], dtype: torch.dtype) -> tuple[OperandTensor, Shapes]:
    """A matrix of this size in the sample's format, without its tensors; and the shapes of these."""
    parts, rest = sample.to_parts()
    if isinstance(rest, UnquantizedTensor):
        return rest, [(size, parts[0].dtype)]
    shapes: list[tuple[int, ...]] = [rest.format.codes_shape(*size), rest.format.scales_shape(*size)]
    shapes += [tuple(part.shape) for part in parts[2:]]  # tensor scale and exponents, the same for all sizes
    found = [(shape, part.dtype) for shape, part in zip(shapes, parts, strict=True)]
    return replace(rest, shape=torch.Size(size), dtype=dtype), found


def parts_of(operand: MatmulOperand | None, *, is_shared: bool) -> list[Tensor]:
    """An operand's tensors, none sharing memory with others; cloned if `is_shared` (others hold them too)."""
    if operand is None:
        return []
    if isinstance(operand.tensor, UnquantizedTensor):  # the input or the weight itself
        operand = replace(operand, tensor=_copied(operand.tensor))
    if operand.low_rank is not None:  # the next split may start from them
        left, right = _copied(operand.low_rank.left), _copied(operand.low_rank.right)
        values = operand.low_rank.values.clone()
        low_rank = replace(operand.low_rank, left=left, values=values, right=right)
        operand = replace(operand, low_rank=low_rank)
    parts = operand.to_parts()[0]
    return [part.clone() if is_shared else part for part in parts]


def _copied(tensor: OperandTensor) -> OperandTensor:
    """A copy of unpacked values; codes have their own memory already."""
    if not isinstance(tensor, UnquantizedTensor):
        return tensor
    return UnquantizedTensor(values=tensor.operand().clone(memory_format=torch.contiguous_format))


@functools.lru_cache(maxsize=256)
def _sample(name: str, dtype: torch.dtype, with_exponents: bool) -> OperandTensor:
    """An example of the quantizer's result, to read its structure from."""
    with _disable_current_modes():
        made = quantizer(name).quantize(_zeros(dtype), with_exponents=with_exponents)
    parts, rest = made.to_parts()
    return rest.from_parts(parts)


@functools.lru_cache(maxsize=256)
def _sample_low_rank(settings: OperandSplit, dtype: torch.dtype) -> LowRankPart:
    """An example of a split's low-rank part, to read its structure from."""
    # A user's gain may need more singular values than this small sample has; the presence of a gain is
    # enough.
    plain = replace(settings, broadcast_dim=None, gains="none")
    with _disable_current_modes():
        found = split(_zeros(dtype), plain, SplitState(), rank=1, step=1, is_replay=False, random_key=NO_KEY)
        gain = None if settings.gains == "none" else torch.ones(())
    return LowRankPart(found.left, found.values, found.right, gain, settings.method == "mean")


def _zeros(dtype: torch.dtype) -> Tensor:
    return torch.zeros(SAMPLE_SIZE, SAMPLE_SIZE, dtype=dtype, device="cpu")
