"""Computes the statistics of a tensor, and its rounding errors at each candidate precision, on its device.

The largest magnitude comes from all elements. The center and the spread of the bulk come from a sample drawn
with Philox: the median, and the 68.27 % quantile of the distance from it. Neither depends on how large the
outliers are. Elements equal to the median are left out of the second one, because the zeros of a sparse
tensor say nothing about the size of the others.

The power of the bulk and its rounding errors come from up to `COUNTED` elements, in pieces of whole blocks
that are spread evenly over rows and columns. The quantizers of the candidates round these pieces, with the
scale of the full tensor; stochastic ones draw up to `DRAWS` times. No distribution is assumed, so heavy
tails, one-sided data and zeros need no special treatment. An error that is an estimate is raised by two
standard errors, because few, rare errors decide in sparse tensors.

Random numbers depend on the key only: they are the same on every device, and torch's generators are left
alone. Not covered: a tensor of which more than 99.9 % is one number may have no other element in its sample;
its sigma is 0, and only bf16 is safe for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey, random_words
from megalowbit.quantize.quantized_tensor import matrix_shape
from megalowbit.quantize.tensor_statistics import in_memory_order, largest_magnitude
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS

WITHIN_SIGMA = 0.6826894921370859  # share of a Gaussian within one standard deviation
PIECE = 128  # neighbouring elements of a row; a multiple of the candidates' blocks
COUNTED = 2**18  # elements of the pieces, at most
DRAWS = 4  # of stochastic rounding, at most: fewer if they have more than `COUNTED` elements together


class _Pieces(NamedTuple):
    """Elements of a tensor, in float32 rows of whole blocks.

    Attributes:
        values: (rows, elements); those behind the end of a row of the tensor are zero.
        is_element: the same shape; false behind the end of a row.
    """

    values: Tensor
    is_element: Tensor


@torch.no_grad()
def estimate(
    x: Tensor,
    settings: EstimatorSettings,
    key: RandomKey,
    *,
    quantizers: Sequence[str] = (),
    full_amax: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Statistics of an operand.

    Args:
        x: floating, any shape and strides.
        settings: the size of the sample.
        key: random key of the sample, of the pieces and of stochastic rounding.
        quantizers: names of the quantizers whose rounding errors are wanted.
        full_amax: maps x's largest magnitude, fp32, to that of the full tensor, if x is a shard of one.

    Returns:
        float64, `COLUMNS` and then an error for each quantizer, on x's device; the host does not wait for
        the device. The largest magnitude is that of the full tensor. If x contains an infinity or a NaN, all
        but the count are NaN. If x is empty, all are zero.
    """
    x = x.detach()
    row = torch.zeros(len(COLUMNS) + len(quantizers), dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return row
    ordered, matrix = in_memory_order(x), x.reshape(matrix_shape(x.shape))
    absmax = largest_magnitude(ordered)
    if full_amax is not None:
        # MAX drops NaN
        largest = absmax.to(torch.float32).nan_to_num(nan=torch.inf, posinf=torch.inf)
        absmax = full_amax(largest).to(torch.float64)
    center, sigma = _center_and_sigma(_sample(ordered, settings.sample, key))
    pieces = _pieces(matrix, max(COUNTED, settings.sample), key)
    wide = pieces.values.to(torch.float64)
    is_bulk = ((wide - center).abs() <= OUTLIER_SIGMAS * sigma) & pieces.is_element
    numbers = [absmax, center, sigma, _mean(wide.square(), is_bulk)]
    for name in quantizers:
        errors = _squared_errors(name, pieces.values, key, absmax.to(torch.float32))
        is_exact = pieces.values.numel() == x.numel() and not quantizer(name).is_stochastic
        numbers.append(_mean(errors[0], is_bulk) if is_exact else _cautious_mean(errors, is_bulk))
    found = torch.stack(numbers)
    row[1:] = torch.where(absmax.isfinite(), found, torch.nan)
    row[0].fill_(x.numel())
    return row


def _squared_errors(name: str, values: Tensor, key: RandomKey, tensor_amax: Tensor) -> Tensor:
    """float64 (draws, *values.shape): squared rounding errors; one draw if rounding is not stochastic."""
    draws = min(DRAWS, max(1, COUNTED // values.numel())) if quantizer(name).is_stochastic else 1
    made = rounded(name, values.repeat(draws, 1), key, tensor_amax).view(draws, *values.shape)
    return (made.to(torch.float64) - values).square()


def rounded(name: str, matrix: Tensor, key: RandomKey, tensor_amax: Tensor) -> Tensor:
    """A matrix, quantised with the scale of a full tensor and dequantised: float32."""
    chosen = quantizer(name)
    found = chosen.quantize(
        matrix.to(torch.float32),
        random_key=key if chosen.is_stochastic else None,
        tensor_amax=tensor_amax,
    )
    return found.dequantize()


def sampled_places(length: int, size: int, key: RandomKey, device: torch.device) -> Tensor:
    """Ascending indices along an axis, one drawn from each of `size` equal sections: int64 (size,).

    All indices, int64 (length,), if the axis is no longer than `size`.
    """
    places = torch.arange(min(length, size), dtype=torch.int64, device=device)
    if length <= size:
        return places
    start, end = places * length // size, (places + 1) * length // size
    words = random_words(-(-size // 4), key, device).flatten()[:size]
    return start + words % (end - start)


def _sample(matrix: Tensor, size: int, key: RandomKey) -> Tensor:
    """float64 (elements,): drawn with replacement, or each element once."""
    if size >= matrix.numel():
        return matrix.flatten().to(torch.float64)
    words = random_words(-(-size // 4), key, matrix.device).view(-1)[:size]
    # in float64, in which this product is the same on every device
    places = (words.to(torch.float64) * (matrix.numel() / 2**32)).to(torch.int64)
    if len(matrix) == 1:
        return matrix[0][places].to(torch.float64)
    rows = torch.div(places, matrix.shape[1], rounding_mode="floor")
    return matrix[rows, places - rows * matrix.shape[1]].to(torch.float64)


def _center_and_sigma(sample: Tensor) -> tuple[Tensor, Tensor]:
    """The median, and the distance from it within which `WITHIN_SIGMA` of the other elements are."""
    ordered, count = sample.sort().values, len(sample)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    distances = (ordered - middle).abs().sort().values
    equal = (distances == 0).sum()
    place = (equal + ((count - equal) * WITHIN_SIGMA).round().to(torch.int64)).clamp(max=count - 1)
    return middle, distances.gather(0, place.unsqueeze(0)).squeeze(0)


def _pieces(matrix: Tensor, most: int, key: RandomKey) -> _Pieces:
    """The whole matrix if it has at most `most` elements; otherwise evenly spread parts of its rows."""
    rows, cols = matrix.shape
    if matrix.numel() <= most:
        return _Pieces(matrix.to(torch.float32), torch.ones_like(matrix, dtype=torch.bool))
    in_row = -(-cols // PIECE)
    places = sampled_places(rows * in_row, most // PIECE, key, matrix.device)
    tops = torch.div(places, in_row, rounding_mode="floor")
    start = (places - tops * in_row) * PIECE
    columns = start.unsqueeze(1) + torch.arange(PIECE, device=matrix.device)
    is_element = columns < cols
    values = matrix[tops.unsqueeze(1), columns.clamp(max=cols - 1)].to(torch.float32)
    return _Pieces(values.masked_fill(~is_element, 0.0), is_element)


def _cautious_mean(errors: Tensor, where: Tensor) -> Tensor:
    """Mean over the draws and these places, raised by two standard errors; 0 if there are none.

    Of a sparse tensor, a few rare errors may make up most of the mean, and the pieces may contain too few.
    """
    kept = torch.where(where, errors, 0.0)
    total, count = kept.sum(), where.sum().clamp(min=1) * len(errors)
    return (total + 2 * kept.square().sum().sqrt()) / count


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean of the values at these places; 0 if there are none."""
    return torch.where(where, values, 0.0).sum() / where.sum().clamp(min=1)
