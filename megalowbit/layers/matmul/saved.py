"""What a forward keeps for backward, as a flat list of tensors whose number and shapes are known beforehand.

A compiled graph is traced on fake tensors: the shape of everything an operator returns must follow from the
recipe and the shapes of input and weight alone. A layout says so for one operand; `empty_parts` makes the
list a tracer sees, `parts_of` the real one, and `factor_from` puts the factor together again in backward.
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

from megalowbit.layers.matmul.context import keeps_weight_codes
from megalowbit.layers.matmul.operand import ExponentRange, Factor, LowRankPart
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.hadamard import GROUP
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import NO_KEY
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import split
from megalowbit.spectral.state import SplitState

SAMPLE_SIZE = 16


class LowRankLayout(NamedTuple):
    """The low-rank part of a split operand: settings, rank, and the size (rows, cols) of the operand."""

    settings: OperandSplit
    rank: int
    size: tuple[int, int]


class Layout(NamedTuple):
    """One operand as it is kept.

    Attributes:
        name: of the quantiser.
        is_transposed: whether the matrix stored is the transpose of what it stands for.
        size: of the matrix as stored; sizes may be symbols.
        low_rank: of a split operand; else `None`.
    """

    name: str
    is_transposed: bool
    size: tuple[int, int]
    low_rank: LowRankLayout | None


def input_layout(recipe: Recipe, sizes: tuple[int, int], shape: Sequence[int]) -> Layout:
    """How an input of this shape is kept in a layer of these sizes (in_features, out_features)."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    low_rank = _low_rank(recipe.split_input, recipe.q_backward_input, sizes, (rows, cols))
    if recipe.layout == "single_copy":
        return Layout(recipe.q_backward_input, False, (rows, cols), low_rank)
    if recipe.hadamard:
        rows = -(-rows // GROUP) * GROUP
    return Layout(recipe.q_backward_input, True, (cols, rows), low_rank)


def weight_layout(recipe: Recipe, sizes: tuple[int, int], shape: Sequence[int]) -> Layout:
    """How a weight of this shape is kept in a layer of these sizes (in_features, out_features)."""
    rows, cols = shape
    low_rank = _low_rank(recipe.split_weight, recipe.q_backward_weight, sizes, (rows, cols))
    if recipe.layout == "single_copy" or keeps_weight_codes(recipe):
        return Layout(recipe.q_backward_weight, False, (rows, cols), low_rank)
    return Layout(recipe.q_backward_weight, True, (cols, rows), low_rank)


def _low_rank(
    settings: OperandSplit | None, name: str, sizes: tuple[int, int], size: tuple[int, int]
) -> LowRankLayout | None:
    if settings is None or quantizer(name).is_identity:
        return None
    return LowRankLayout(settings, settings.rank_of(*sizes), size)


def empty_parts(layout: Layout, like: Tensor) -> list[Tensor]:
    """The parts of an operand made from something like `like`, not filled in."""
    parts = _empty_matrix(_sample(layout.name, like.dtype), layout.size, like)
    if layout.low_rank is None:
        return parts
    settings, rank, (rows, cols) = layout.low_rank
    sample = _sample_low_rank(settings, like.dtype)
    parts += _empty_matrix(sample.left, (rank, rows), like)
    parts += _empty_matrix(sample.right, (rank, cols), like)
    parts.append(like.new_empty((rank,), dtype=sample.values.dtype))
    if sample.gain is not None:
        parts.append(like.new_empty((), dtype=sample.gain.dtype))
    return parts


def _empty_matrix(
    sample: QuantizedTensor | UnquantizedTensor, size: tuple[int, int], like: Tensor
) -> list[Tensor]:
    if isinstance(sample, UnquantizedTensor):
        return [like.new_empty(size, dtype=sample.dtype)]
    format = sample.format
    shapes = (format.codes_shape(*size), format.scales_shape(*size), ())
    parts = sample.to_parts()[0]
    return [like.new_empty(shape, dtype=part.dtype) for shape, part in zip(shapes, parts, strict=False)]


def parts_of(factor: Factor | None, *, is_shared: bool) -> list[Tensor]:
    """A factor's tensors, none of them the memory of something else.

    Args:
        factor: what is kept, or `None`.
        is_shared: whether somebody else holds its tensors too.
    """
    if factor is None:
        return []
    if isinstance(factor.tensor, UnquantizedTensor):  # the input or the weight itself
        factor = replace(factor, tensor=_copied(factor.tensor))
    if factor.low_rank is not None:  # directions that a split goes on from
        left, right = _copied(factor.low_rank.left), _copied(factor.low_rank.right)
        factor = replace(factor, low_rank=replace(factor.low_rank, left=left, right=right))
    parts = factor.to_parts()[0]
    return [part.clone() if is_shared else part for part in parts]


def _copied(tensor: QuantizedTensor | UnquantizedTensor) -> QuantizedTensor | UnquantizedTensor:
    """In memory of its own; codes have it already."""
    if not isinstance(tensor, UnquantizedTensor):
        return tensor
    return UnquantizedTensor(values=tensor.operand().clone(memory_format=torch.contiguous_format))


def factor_from(
    layout: Layout, dtype: torch.dtype, parts: list[Tensor], exponents: tuple[int, int]
) -> tuple[Factor, list[Tensor]]:
    """Inverse of `parts_of`: the factor, and the parts that are left.

    Args:
        layout: of the operand.
        dtype: of the tensor it was made from.
        parts: its parts, and further ones.
        exponents: lowest and highest block exponent; negative where nobody asked.
    """
    tensor, parts = _matrix(_sample(layout.name, dtype), layout.size, dtype, parts)
    low_rank = None
    if layout.low_rank is not None:
        settings, rank, (rows, cols) = layout.low_rank
        sample = _sample_low_rank(settings, dtype)
        left, parts = _matrix(sample.left, (rank, rows), sample.left.dtype, parts)
        right, parts = _matrix(sample.right, (rank, cols), sample.right.dtype, parts)
        values, *parts = parts
        gain = None
        if sample.gain is not None:
            gain, *parts = parts
        low_rank = LowRankPart(left, values, right, gain, settings.method == "mean")
    lowest, highest = exponents
    known = ExponentRange(lowest=lowest, highest=highest) if lowest >= 0 else None
    return Factor(tensor, layout.is_transposed, known, low_rank), parts


def _matrix(
    sample: QuantizedTensor | UnquantizedTensor,
    size: tuple[int, int],
    dtype: torch.dtype,
    parts: list[Tensor],
) -> tuple[QuantizedTensor | UnquantizedTensor, list[Tensor]]:
    count = len(sample.to_parts()[0])
    own, rest = tuple(parts[:count]), parts[count:]
    if isinstance(sample, UnquantizedTensor):
        return UnquantizedTensor(values=own[0]), rest
    return replace(sample.from_parts(own), shape=torch.Size(size), dtype=dtype), rest


@functools.lru_cache(maxsize=256)
def _sample(name: str, dtype: torch.dtype) -> QuantizedTensor | UnquantizedTensor:
    """Something the quantiser has made, to see what it makes."""
    with _disable_current_modes():
        made = quantizer(name).quantize(_zeros(dtype))
    parts, rest = made.to_parts()
    return rest.from_parts(parts)


@functools.lru_cache(maxsize=256)
def _sample_low_rank(settings: OperandSplit, dtype: torch.dtype) -> LowRankPart:
    """The low-rank part of some split, to see what it is made of."""
    # A user's gain may ask for more singular values than there are here; whether there is one is enough.
    plain = replace(settings, broadcast_dim=None, gains="none")
    with _disable_current_modes():
        found = split(_zeros(dtype), plain, SplitState(), rank=1, step=1, is_replay=False, random_key=NO_KEY)
        gain = None if settings.gains == "none" else torch.ones(())
    return LowRankPart(found.left, found.values, found.right, gain)


def _zeros(dtype: torch.dtype) -> Tensor:
    return torch.zeros(SAMPLE_SIZE, SAMPLE_SIZE, dtype=dtype, device="cpu")
