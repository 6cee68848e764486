"""Computes the statistics of a tensor on its device.

The largest magnitude and the sum of squares come from all elements. They are computed in float64, which does
not overflow or underflow, and on a CPU in one pass (`quantize.tensor_statistics`). The center and the spread
come from a sample. It is drawn with Philox, is the same on every device, and leaves torch's generators alone:

| type       | center            | sigma                                                                   |
|------------|-------------------|-------------------------------------------------------------------------|
| `quantile` | median            | 68.27 % quantile of the distance from the median                        |
| `mad`      | median            | 1.4826 · median distance from the median                                |
| `negative` | mean              | standard deviation; both of the sample with the smallest variance       |

`negative` draws `negative_k` samples. It is biased low because it takes the minimum. With m elements a sample
and a share ε of outliers it fails once m·ε is large, because then every sample contains outliers. Rare
outliers would hardly occur in a small sample. They are counted, and the bulk's power is computed, on up to
`COUNTED` elements, in runs spread evenly over the tensor, which cover all channels equally.

Not covered: the position of outliers. If more than 68 % of the bulk is one number, its sigma is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalowbit.quantize.philox import RandomKey, random_words
from megalowbit.quantize.tensor_statistics import in_memory_order, tensor_moments
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS

WITHIN_SIGMA = 0.6826894921370859  # share of a Gaussian within one standard deviation
MAD_FACTOR = 1.482602218505602  # standard deviation of a Gaussian over its median absolute deviation
ODD = 0x9E3779B97F4A7C15  # moves the runs by a pseudo-random distance each step
RUN = 4096  # elements of a contiguous run
COUNTED = 2**18  # elements in which outliers are counted: a share of 1e-4 is estimated to ±20 %


@torch.no_grad()
def estimate(x: Tensor, settings: EstimatorSettings, key: RandomKey) -> Tensor:
    """Statistics of an operand.

    Args:
        x: floating, any shape and strides.
        settings: how center and sigma are estimated, and from how many elements.
        key: random key of the sample.

    Returns:
        float64 (7,), a row of `COLUMNS`, on x's device; the host does not wait for the device. If x contains
        an infinity or a NaN, all but the count are NaN. If x is empty, all are zero.
    """
    matrix = in_memory_order(x.detach())
    count = matrix.numel()
    row = torch.zeros(len(COLUMNS), dtype=torch.float64, device=x.device)
    if count == 0:
        return row
    absmax, squares = tensor_moments(matrix)
    power = squares / count
    sample = _sample(matrix, settings, key)
    center, sigma = _SPREADS[settings.type](sample)
    bulk_power, share = _bulk(_runs(matrix, settings, key), center, sigma)
    has_outlier = absmax - center.abs() > OUTLIER_SIGMAS * sigma
    share = share.maximum(has_outlier.to(torch.float64) / count)
    numbers = torch.stack([absmax, center, sigma, power, bulk_power, share])
    row[1:] = torch.where((absmax + power).isfinite(), numbers, torch.nan)
    row[0].fill_(count)
    return row


def _sample(matrix: Tensor, settings: EstimatorSettings, key: RandomKey) -> Tensor:
    """float64 (samples, elements): drawn with replacement, or each element once."""
    if settings.sample >= matrix.numel():
        return matrix.flatten().to(torch.float64).unsqueeze(0)
    num_samples = settings.negative_k if settings.type == "negative" else 1
    size = num_samples * settings.sample
    words = random_words(-(-size // 4), key, matrix.device).view(-1)[:size]
    # in float64, in which this product is the same on every device
    places = (words.to(torch.float64) * (matrix.numel() / 2**32)).to(torch.int64)
    return _elements(matrix, places).to(torch.float64).view(num_samples, settings.sample)


def _elements(matrix: Tensor, places: Tensor) -> Tensor:
    """Elements by their row-major index; rows need not be contiguous in memory."""
    if len(matrix) == 1:
        return matrix[0][places]
    rows = torch.div(places, matrix.shape[1], rounding_mode="floor")
    return matrix[rows, places - rows * matrix.shape[1]]


def _median_and_distance(sample: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The median, and the distance from it within which `share` of the sample is."""
    ordered = sample.flatten().sort().values
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    distances = (ordered - middle).abs().sort().values
    return middle, distances[min(round(share * len(distances)), len(distances) - 1)]


def _quantile(sample: Tensor) -> tuple[Tensor, Tensor]:
    return _median_and_distance(sample, WITHIN_SIGMA)


def _median_absolute_deviation(sample: Tensor) -> tuple[Tensor, Tensor]:
    center, distance = _median_and_distance(sample, 0.5)
    return center, MAD_FACTOR * distance


def _least_variance(samples: Tensor) -> tuple[Tensor, Tensor]:
    variances, means = torch.var_mean(samples, dim=1, correction=0)
    variance, index = variances.min(0)
    return means.gather(0, index.unsqueeze(0)).squeeze(0), variance.sqrt()


_SPREADS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "quantile": _quantile,
    "mad": _median_absolute_deviation,
    "negative": _least_variance,
}


def _bulk(sample: Tensor, center: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Mean square of the elements within `OUTLIER_SIGMAS`, and the share of those beyond."""
    wide = sample.to(torch.float64)
    is_outlier = (wide - center).abs_() > OUTLIER_SIGMAS * sigma
    num_outliers = is_outlier.sum()
    bulk = wide.masked_fill(is_outlier, 0.0).view(-1)
    bulk_power = torch.dot(bulk, bulk) / (len(bulk) - num_outliers).clamp(min=1)
    return bulk_power, num_outliers.to(torch.float64) / len(bulk)


def _run(matrix: Tensor, place: int) -> Tensor:
    """`RUN` neighbouring elements from a row-major index on; copies only the rows they are in."""
    cols = matrix.shape[1]
    top, bottom = place // cols, -(-(place + RUN) // cols)
    return matrix[top:bottom].flatten()[place - top * cols :][:RUN]


def _runs(matrix: Tensor, settings: EstimatorSettings, key: RandomKey) -> Tensor:
    """Up to `COUNTED` elements: all, or equally spaced runs of `RUN`, whose offset depends on the key."""
    count = matrix.numel()
    if count <= max(COUNTED, settings.sample):
        return matrix.flatten()
    num_runs = COUNTED // RUN
    distance = count // num_runs
    start = (key.key + key.step * ODD) % (distance - RUN + 1)
    if len(matrix) == 1:
        return matrix[0, : num_runs * distance].view(num_runs, distance)[:, start : start + RUN]
    return torch.cat([_run(matrix, place) for place in range(start, num_runs * distance, distance)])
