import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from host_reads import HostReads
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.tensor_statistics import CPU_PIECE
from megalowbit.speculation.estimator import COUNTED, estimate
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OperandStatistics

DEFAULT = EstimatorSettings()
KEY = RandomKey(1)
TYPES = ("quantile", "mad", "negative")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def statistics(x, settings=DEFAULT, key=KEY):
    return OperandStatistics(**dict(zip(COLUMNS, estimate(x, settings, key).tolist(), strict=True)))


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_outliers(x, count, magnitude, seed=0):
    places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:count]
    x.view(-1)[places] = magnitude
    return x


# What is exact: of all elements


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitude_and_power_are_those_of_all_elements(dtype):
    x = gaussian(3, 700, 57, dtype=dtype)
    assert x.numel() > CPU_PIECE  # and no multiple of it
    assert x.numel() % CPU_PIECE
    wide = x.double().numpy()
    found = statistics(x)
    assert found.count == wide.size
    assert found.absmax == np.abs(wide).max()
    assert found.power == pytest.approx(np.mean(wide**2), rel=1e-12)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::3],
        lambda x: x[5:200, 7:90],
        lambda x: x.view(4, 64, 96).permute(2, 0, 1),
        lambda x: x[0, 0],
        lambda x: x[:1].expand(40, 96),
    ],
)
def test_strides_do_not_matter(view):
    x = view(gaussian(256, 96) + 0.1)
    wide = x.double().numpy()
    found = statistics(x, EstimatorSettings(sample=30000))
    assert found.count == wide.size
    assert found.absmax == np.abs(wide).max()
    assert found.power == pytest.approx(np.mean(wide**2), rel=1e-12)
    assert found.center == pytest.approx(np.median(wide), rel=1e-12)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_numbers_whose_squares_leave_fp32_do_not_vanish_or_overflow(size):
    found = statistics(gaussian(512, 128, dtype=torch.bfloat16) * size)
    assert found.power == pytest.approx(size**2, rel=0.05)
    assert found.sigma == pytest.approx(size, rel=0.05)
    assert found.bulk_power == pytest.approx(size**2, rel=0.05)


# What is estimated: reference on all elements


def test_a_sample_as_large_as_the_tensor_takes_each_element_once():
    x = with_outliers(gaussian(300, 37) * 0.5 + 0.2, 11, 40.0)
    wide = np.sort(x.double().numpy().ravel())
    settings = EstimatorSettings(sample=x.numel())
    found = statistics(x, settings)
    center = np.median(wide)
    distances = np.sort(np.abs(wide - center))
    sigma = distances[round(0.6826894921370859 * len(wide))]
    bulk = wide[np.abs(wide - center) <= 6 * sigma]
    assert found.center == pytest.approx(center, rel=1e-12)
    assert found.sigma == pytest.approx(sigma, rel=1e-12)
    assert found.bulk_power == pytest.approx(np.mean(bulk**2), rel=1e-12)
    assert found.outlier_share == 11 / wide.size
    for kind in TYPES:
        all_of_it = settings.model_copy(update={"type": kind})
        assert statistics(x, all_of_it, RandomKey(1)) == statistics(x, all_of_it, RandomKey(2, 3))


def test_the_median_deviation_and_the_variance_of_all_elements():
    x = gaussian(300, 37) * 0.5 + 0.2
    wide = x.double().numpy().ravel()
    mad = statistics(x, EstimatorSettings(type="mad", sample=x.numel()))
    deviation = np.median(np.abs(wide - np.median(wide)))
    assert mad.sigma == pytest.approx(1.4826022185 * deviation, rel=1e-4)
    negative = statistics(x, EstimatorSettings(type="negative", sample=x.numel()))
    assert (negative.center, negative.sigma) == pytest.approx((wide.mean(), wide.std()), rel=1e-9)


@pytest.mark.parametrize("kind", ["quantile", "mad"])
@pytest.mark.parametrize("share", [0.0, 1e-4, 1e-3])
def test_quantiles_read_sigma_to_half_a_percent_whatever_the_outliers(kind, share):
    x = gaussian(1024, 512)
    with_outliers(x, round(share * x.numel()), 100.0)
    settings = EstimatorSettings(type=kind)
    sigmas = [statistics(x, settings, RandomKey(seed)).sigma for seed in range(24)]
    assert np.mean(sigmas) == pytest.approx(1.0, abs=0.006)
    assert np.max(np.abs(np.array(sigmas) - 1)) < 0.06


def test_the_least_of_several_variances_reads_low():
    x = gaussian(1024, 512)

    def mean_sigma(size):
        settings = EstimatorSettings(type="negative", sample=size)
        return np.mean([statistics(x, settings, RandomKey(seed)).sigma for seed in range(40)])

    assert mean_sigma(10_000) == pytest.approx(0.991, abs=0.003)
    assert mean_sigma(256) == pytest.approx(0.945, abs=0.015)


def test_the_least_of_several_variances_fails_once_no_sample_is_free_of_outliers():
    x = gaussian(1024, 512)
    settings = EstimatorSettings(type="negative")
    few = with_outliers(x.clone(), 5, 100.0)  # m·ε = .08 in each of 5 samples
    many = with_outliers(x.clone(), 524, 100.0)  # m·ε = 8
    assert statistics(few, settings).sigma == pytest.approx(1.0, abs=0.05)
    assert statistics(many, settings).sigma > 2.0
    assert statistics(many).sigma == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("kind", TYPES)
def test_the_bulk_is_separated_from_outliers(kind):
    x = with_outliers(gaussian(1024, 512) + 0.25, 60, 50.0)
    found = statistics(x, EstimatorSettings(type=kind, sample=2048))
    assert found.bulk_power == pytest.approx(1 + 0.25**2, rel=0.02)
    assert found.outlier_share == pytest.approx(60 / x.numel(), rel=0.6)


def test_one_outlier_that_no_sample_met_is_known_from_the_largest_magnitude():
    x = gaussian(2048, 512)
    x[1000, 300] = 30.0
    found = statistics(x, EstimatorSettings(sample=64))
    assert found.outlier_share >= 1 / x.numel()
    assert statistics(gaussian(2048, 512)).outlier_share == 0


def test_outlier_channels_are_counted_in_a_large_tensor():
    x = gaussian(3000, 640)
    assert x.numel() > COUNTED
    x[:, 77] = 20.0
    for seed in range(5):
        assert statistics(x, key=RandomKey(seed)).outlier_share == pytest.approx(1 / 640, rel=0.03)


def test_where_outliers_are_counted_in_a_large_tensor_moves_with_the_key():
    x = gaussian(4, COUNTED)
    powers = {statistics(x, key=key).bulk_power for key in (KEY, RandomKey(999), RandomKey(1, 1))}
    assert len(powers) == 3
    assert all(power == pytest.approx(1.0, rel=0.02) for power in powers)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("key", [KEY, RandomKey(77, 3)])
def test_a_slice_of_columns_is_read_in_place_and_gives_the_statistics_of_its_copy(kind, key):
    wide = with_outliers(gaussian(900, 1700, dtype=torch.bfloat16), 3000, 30.0)
    settings = EstimatorSettings(type=kind, sample=2048)
    for x in (wide[:, 300:900], wide[:, 300:900].t(), wide[:, :1600:2], wide[:3, :1699].expand(900, -1, -1)):
        assert x.numel() > COUNTED
        found, expected = statistics(x, settings, key), statistics(x.contiguous(), settings, key)
        assert found.power == pytest.approx(expected.power, rel=1e-12)
        if x.stride(-1) <= x.stride(0):  # a turned copy lies in another order
            assert replace(found, power=0.0) == replace(expected, power=0.0)


# Properties


@pytest.mark.parametrize("kind", TYPES)
def test_the_key_alone_decides_what_is_drawn(kind):
    x = gaussian(1024, 512)
    settings = EstimatorSettings(type=kind, sample=512)
    before = torch.get_rng_state()
    first = estimate(x, settings, RandomKey(5, 7))
    torch.rand(3)
    assert torch.equal(first, estimate(x, settings, RandomKey(5, 7)))
    for other in (RandomKey(6, 7), RandomKey(5, 8)):
        assert estimate(x, settings, other)[COLUMNS.index("sigma")] != first[COLUMNS.index("sigma")]
    torch.set_rng_state(before)
    estimate(x, settings, RandomKey(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_reach_every_part_of_a_tensor():
    x = torch.zeros(64, 1024)
    one_mean = EstimatorSettings(type="negative", sample=4096, negative_k=1)
    for row in range(64):
        x.zero_()[row] = 1.0
        assert statistics(x, one_mean).center == pytest.approx(1 / 64, abs=0.008)


@pytest.mark.parametrize("kind", TYPES)
def test_scaling_by_a_power_of_two_scales_the_row(kind):
    x = with_outliers(gaussian(512, 600), 40, 17.0)
    settings = EstimatorSettings(type=kind, sample=1000)
    small, large = statistics(x, settings), statistics(x * -8, settings)
    assert large.absmax == 8 * small.absmax
    assert large.sigma == pytest.approx(8 * small.sigma, rel=1e-12)
    assert large.center == pytest.approx(-8 * small.center, rel=1e-9)
    assert large.power == pytest.approx(64 * small.power, rel=1e-12)
    assert large.bulk_power == pytest.approx(64 * small.bulk_power, rel=1e-12)
    assert large.outlier_share == small.outlier_share


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(1024, 512), (7, 5), ()])
def test_the_host_reads_nothing(kind, shape, monkeypatch):
    settings = EstimatorSettings(type=kind, sample=1024)
    x = gaussian(*shape)
    with HostReads(monkeypatch) as reads:
        estimate(x, settings, RandomKey(1))
    assert not reads.events
    with FakeTensorMode() as mode:  # tensors without numbers: a read would raise
        row = estimate(mode.from_tensor(x), settings, RandomKey(1))
    assert row.shape == (len(COLUMNS),)
    assert row.dtype == torch.float64


# Tensors that are no bulk


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", TYPES)
def test_numbers_of_a_tensor_that_is_not_finite_are_not_finite(value, kind):
    x = gaussian(512, 300)
    x[17, 3] = value
    found = statistics(x, EstimatorSettings(type=kind, sample=128))
    assert found.count == x.numel()
    assert all(math.isnan(getattr(found, column)) for column in COLUMNS[1:])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_has_zeros(shape):
    assert estimate(torch.empty(shape, dtype=torch.bfloat16), DEFAULT, RandomKey(1)).tolist() == [0.0] * 7


def test_a_constant_has_no_spread():
    found = statistics(torch.full((100, 700), -3.0))
    assert found == OperandStatistics(
        count=70000.0, absmax=3.0, center=-3.0, sigma=0.0, power=9.0, bulk_power=9.0, outlier_share=0.0
    )


def test_zeros_are_a_bulk_without_power():
    found = statistics(torch.zeros(30, 30))
    assert (found.absmax, found.sigma, found.power, found.bulk_power, found.outlier_share) == (0, 0, 0, 0, 0)


def test_one_element():
    found = statistics(torch.tensor([2.5]))
    assert (found.count, found.absmax, found.center, found.sigma, found.power) == (1, 2.5, 2.5, 0, 6.25)
