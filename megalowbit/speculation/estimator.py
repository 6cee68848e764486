"""From a tensor to its statistics, on its device: magnitude and power of all of it, the rest of a sample.

All elements are read for the largest magnitude and the sum of squares in float64, which neither overflows nor
vanishes where the tensor does not; on a CPU in one pass (`quantize.tensor_statistics`). Center and spread are
read off a sample drawn with Philox, the same on every device, without touching torch's generators:

| type       | center            | sigma                                                                   |
|------------|-------------------|-------------------------------------------------------------------------|
| `quantile` | median            | the distance from it that 68.27 % of the sample keep                    |
| `mad`      | median            | 1.4826 · the distance from it that half of the sample keep              |
| `negative` | mean              | standard deviation; of the `negative_k` samples with the least variance |

`negative` is the idea this package began with; it reads low by choosing the least, and with m elements a
sample and a share ε of outliers it fails once m·ε is large: then no sample is free of them. Few outliers are
hardly in such a sample, so they are counted, and the bulk's power is taken, in up to `COUNTED` elements: runs
spread evenly over the tensor, which meet all channels alike.

Not covered: where the outliers are; a bulk of which more than 68 % are one number has a sigma of 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalowbit.quantize.philox import RandomKey, random_words
from megalowbit.quantize.tensor_statistics import in_memory_order, tensor_moments
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS

WITHIN_SIGMA = 0.6826894921370859  # of a Gaussian, within one standard deviation
MAD_FACTOR = 1.482602218505602  # standard deviation of a Gaussian over its median absolute deviation
ODD = 0x9E3779B97F4A7C15  # a step moves the runs by as good as a random distance
RUN = 4096  # neighbouring elements that are counted together
COUNTED = 2**18  # elements among which outliers are counted: a share of 1e-4 is found to ±20 %


@torch.no_grad()
def estimate(x: Tensor, settings: EstimatorSettings, key: RandomKey) -> Tensor:
    """Statistics of an operand.

    Args:
        x: floating, any shape and strides.
        settings: how center and sigma are estimated, and from how many elements.
        key: of the sample.

    Returns:
        float64 (7,), a row of `COLUMNS`, on x's device; nothing waits for the device. NaN throughout, but
        for the count, where x has an infinity or a NaN; zeros where x is empty.
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
    """float64 (samples, elements): drawn with replacement, or all elements once."""
    if settings.sample >= matrix.numel():
        return matrix.flatten().to(torch.float64).unsqueeze(0)
    num_samples = settings.negative_k if settings.type == "negative" else 1
    size = num_samples * settings.sample
    words = random_words(-(-size // 4), key, matrix.device).view(-1)[:size]
    # In float64, where a product with any count is the same on every device.
    places = (words.to(torch.float64) * (matrix.numel() / 2**32)).to(torch.int64)
    return _elements(matrix, places).to(torch.float64).view(num_samples, settings.sample)


def _elements(matrix: Tensor, places: Tensor) -> Tensor:
    """Elements by their place in the order of the rows, which may lie apart in memory."""
    if len(matrix) == 1:
        return matrix[0][places]
    rows = torch.div(places, matrix.shape[1], rounding_mode="floor")
    return matrix[rows, places - rows * matrix.shape[1]]


def _median_and_distance(sample: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The median, and the distance from it that `share` of the sample keep."""
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
    """Mean square of what lies within `OUTLIER_SIGMAS`, and the share of what lies beyond."""
    wide = sample.to(torch.float64)
    is_outlier = (wide - center).abs_() > OUTLIER_SIGMAS * sigma
    num_outliers = is_outlier.sum()
    bulk = wide.masked_fill(is_outlier, 0.0).view(-1)
    bulk_power = torch.dot(bulk, bulk) / (len(bulk) - num_outliers).clamp(min=1)
    return bulk_power, num_outliers.to(torch.float64) / len(bulk)


def _run(matrix: Tensor, place: int) -> Tensor:
    """The same, of neighbours: only their rows are copied."""
    cols = matrix.shape[1]
    top, bottom = place // cols, -(-(place + RUN) // cols)
    return matrix[top:bottom].flatten()[place - top * cols :][:RUN]


def _runs(matrix: Tensor, settings: EstimatorSettings, key: RandomKey) -> Tensor:
    """Up to `COUNTED` elements: all, or runs of `RUN` at equal distances, which start where the key says."""
    count = matrix.numel()
    if count <= max(COUNTED, settings.sample):
        return matrix.flatten()
    num_runs = COUNTED // RUN
    distance = count // num_runs
    start = (key.key + key.step * ODD) % (distance - RUN + 1)
    if len(matrix) == 1:
        return matrix[0, : num_runs * distance].view(num_runs, distance)[:, start : start + RUN]
    return torch.cat([_run(matrix, place) for place in range(start, num_runs * distance, distance)])
