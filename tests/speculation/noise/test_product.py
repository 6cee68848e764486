"""Predictions against products that are really computed, in float64, of really quantised operands."""

import cProfile
import itertools
import math
import pstats
from dataclasses import replace

import pytest
import torch
from quick_cases import every_value

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.speculation.estimator import estimate
from megalowbit.speculation.noise.product import (
    MAX_DB,
    operand_noise,
    predict_snr_db,
    zeros_snr_db,
)
from megalowbit.speculation.noise.rounding import zero_probability
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OperandStatistics

RATIOS = (8, 12, 16, 23, 32, 48, 64, 96, 128)
COUNTS = (1, 13, 131)  # outliers among 256 × 512: to a share of 1e-3
EVEN_GRIDS = (("int8", "int8"), ("int8:sr", "int8"))
FLOATS = (
    ("fp8e4m3", "fp8e4m3"),
    ("fp8e5m2", "fp8e4m3"),
    ("fp8e5m2", "fp8e5m2"),
    ("fp8e4m3:sr", "fp8e5m2:sr"),
    ("fp8e5m2:sr", "fp8e4m3"),  # the candidate `fp8`: grad_output and weight
)
INT4 = (("int4", "int4"), ("int4:sr", "int4"))
BLOCKS = (
    ("nvfp4e2m1bnosr", "nvfp4e2m1bnosr"),
    ("nvfp4e2m1b", "nvfp4e2m1bnosr"),
    ("int8e5m2b", "int8e5m2b"),
    ("int8e5m2b:sr", "int8e5m2b"),
)


def statistics(x, key=1):
    row = estimate(x, EstimatorSettings(), RandomKey(key)).tolist()
    return OperandStatistics(**dict(zip(COLUMNS, row, strict=True)))


def with_outliers(ratio, count, seed, rows=256):
    """A Gaussian with magnitudes spread evenly in [ratio / 2, ratio] planted, one of them the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 512, generator=generator)
    places = torch.randperm(x.numel(), generator=generator)[:count]
    magnitudes = ratio * (0.5 + 0.5 * torch.rand(count, generator=generator))
    magnitudes[0] = ratio
    x.view(-1)[places] = magnitudes * torch.randn(count, generator=generator).sign()
    return x


def quantized(x, name, seed):
    chosen = quantizer(name)
    return chosen(x, random_key=RandomKey(seed) if chosen.is_stochastic else None).double()


class Pair:
    """Two operands, their statistics and their product."""

    def __init__(self, left, right, signal="bulk"):
        self.raw = (left, right)
        self.statistics = (statistics(left, 1), statistics(right, 2))
        self.signal = signal
        self.masks = [
            (x.double() - of.center).abs() <= (6 * of.sigma if signal == "bulk" else math.inf)
            for x, of in zip(self.raw, self.statistics, strict=True)
        ]
        left, right = (x.double() * mask for x, mask in zip(self.raw, self.masks, strict=True))
        self.product = left @ right.t()
        self.energy = self.product.square().sum().item()

    def noise(self, names):
        left, right = (
            quantized(x, name, 7 + i) * mask
            for i, (x, name, mask) in enumerate(zip(self.raw, names, self.masks, strict=True))
        )
        return (left @ right.t() - self.product).square().sum().item()

    def measured(self, names):
        return 10 * math.log10(self.energy / self.noise(names))

    def predicted(self, names):
        left, right = zip(names, self.statistics, strict=True)
        return predict_snr_db(left, right, signal=self.signal)


def planted(ratio, count, signal="bulk", draw=0):
    seed = 10_000 * ratio + 10 * count + 2 * draw
    return Pair(with_outliers(ratio, count, seed), with_outliers(ratio, count, seed + 1), signal)


# The bulk of products with outliers


@every_value(ratio=RATIOS, count=COUNTS)
def test_the_bulk_is_predicted_to_one_decibel(ratio, count):
    pair = planted(ratio, count)
    for names in (*EVEN_GRIDS, *FLOATS, *(INT4 if ratio <= 16 else ())):
        assert pair.predicted(names) == pytest.approx(pair.measured(names), abs=0.5), names
    for names in BLOCKS:
        assert pair.predicted(names) == pytest.approx(pair.measured(names), abs=1.0), names


def test_one_scale_at_32_sigma_leaves_the_bulk_20_decibels():
    pair = planted(32, 1)
    names = ("int8", "int8")
    assert pair.measured(names) == pytest.approx(19.8, abs=0.25)
    assert pair.predicted(names) == pytest.approx(19.8, abs=0.25)


@pytest.mark.parametrize("ratio", [23, 32, 128])
def test_where_int4_has_lost_the_bulk_its_prediction_is_low(ratio):
    pair = planted(ratio, 13)
    for names in INT4:
        measured = pair.measured(names)
        assert measured < 0.1
        assert pair.predicted(names) < measured


# Whole products: what is expected of several, as it is chance whether outliers meet


@every_value(ratio=[8, 32, 64, 128], count=COUNTS)
def test_whole_products_are_predicted_to_one_decibel(ratio, count):
    draws = 2 if count == 1 or ratio <= 32 else 10
    pairs = [planted(ratio, count, "all", draw) for draw in range(draws)]
    energy = sum(pair.energy for pair in pairs)
    nvfp4 = BLOCKS[:1] if ratio <= 64 else ()  # whose few large errors leave more to chance
    for names in (*EVEN_GRIDS, *FLOATS[:2], *nvfp4, *(INT4 if ratio == 8 else ())):
        measured = 10 * math.log10(energy / sum(pair.noise(names) for pair in pairs))
        predicted = sum(pair.predicted(names) for pair in pairs) / draws
        assert predicted == pytest.approx(measured, abs=1.0), names


def test_a_density_of_outliers_hardly_moves_the_noise_of_an_even_grid():
    few, many = (operand_noise("int8", statistics(with_outliers(64, count, 5))) for count in (1, 131))
    assert many.bulk == pytest.approx(few.bulk, rel=0.02)
    assert many.all == pytest.approx(few.all, rel=0.02)


# One operand


@every_value(
    name=[
        *("int4", "int8:sr", "fp8e4m3", "fp8e5m2:sr"),
        *("nvfp4e2m1b", "mxfp4e2m1bnosr", "int8b", "int8e5m2b"),
    ],
    center=[0.0, 0.7, -2.0],
)
def test_an_operand_errs_as_its_quantizer_does(name, center):
    x = with_outliers(40, 60, 3, rows=2048) + center
    of = statistics(x)
    errors = (quantized(x, name, 3) - x.double()).square()
    is_bulk = (x.double() - of.center).abs() <= 6 * of.sigma
    found = operand_noise(name, of)
    assert found.bulk == pytest.approx(errors[is_bulk].mean().item(), rel=0.1)
    assert found.all == pytest.approx(errors.mean().item(), rel=0.12)


@pytest.mark.parametrize("name", ["fp8e4m3", "nvfp4e2m1bnosr", "nvfp4e2m1b", "int8e5m2b", "mxfp4e2m1bnosr"])
def test_outliers_err_as_the_quantizer_lets_them(name):
    x = with_outliers(120, 1000, 3, rows=2048)
    of = statistics(x)
    errors = (quantized(x, name, 3) - x.double()).square()
    bulk = errors[x.abs() <= 6].sum().item() / x.numel()
    found = operand_noise(name, of)
    of_outliers = found.all - (1 - of.outlier_share) * found.bulk
    assert of_outliers == pytest.approx(errors.mean().item() - bulk, rel=0.35)


@pytest.mark.parametrize("count", [1, 3])
def test_the_largest_element_itself_does_not_err(count):
    found = errors = 0.0
    for seed in range(60):
        x = with_outliers(120, count, seed, rows=32)
        errors += (quantized(x, "fp8e4m3", 3) - x.double()).square().mean().item()
        found += operand_noise("fp8e4m3", statistics(x)).all
    assert found == pytest.approx(errors, rel=0.05)


def test_scaling_an_operand_changes_no_prediction():
    of = statistics(with_outliers(40, 60, 3))
    scaled = OperandStatistics(
        count=of.count,
        absmax=of.absmax * 2**40,
        center=of.center * 2**40,
        sigma=of.sigma * 2**40,
        power=of.power * 2**80,
        bulk_power=of.bulk_power * 2**80,
        outlier_share=of.outlier_share,
    )
    for names in (*EVEN_GRIDS, *FLOATS, *BLOCKS):
        for signal in ("bulk", "all"):
            small = predict_snr_db((names[0], of), (names[1], of), signal=signal)
            large = predict_snr_db((names[0], scaled), (names[1], of), signal=signal)
            assert large == pytest.approx(small, abs=1e-6)


def test_the_order_of_operands_does_not_matter():
    one, other = statistics(with_outliers(40, 60, 3)), statistics(with_outliers(9, 2, 4))
    left, right = ("int8", one), ("fp8e5m2", other)
    assert predict_snr_db(left, right) == pytest.approx(predict_snr_db(right, left))


@pytest.mark.parametrize("name", ["int4", "int8", "int8:sr", "nvfp4e2m1b"])
def test_a_larger_maximum_never_helps(name):
    of = statistics(with_outliers(8, 60, 3))
    series = [replace(of, absmax=8 * 2 ** (i / 4), power=of.power + 60 / 131072 * 16**i) for i in range(24)]
    predicted = [predict_snr_db((name, each), (name, of)) for each in series]
    assert all(later <= sooner + 0.05 for sooner, later in itertools.pairwise(predicted))


# Data that are no Gaussian with outliers: how far off


def other_data():
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    uniform = torch.rand(256, 512, generator=generator) * 2 - 1
    return {
        "mean of 1": normal(256, 512) + 1,
        "uniform": uniform,
        "laplace": -uniform.sign() * torch.log1p(-uniform.abs()),
        "gelu": torch.nn.functional.gelu(1.5 * normal(256, 512)),
        "swiglu": torch.nn.functional.silu(normal(256, 512)) * normal(256, 512),
        "low rank": normal(256, 8) @ normal(8, 512) + 0.3 * normal(256, 512),
        "channels": normal(256, 512) * (1 + 29 * (torch.arange(512) % 128 == 7)),
        "rows": normal(256, 512) * torch.exp(1.5 * normal(256, 1)),
        "zeros": torch.nn.functional.relu(normal(256, 512)),
    }


# data: (too low by at most, too high by at most), in dB, of INT8, FP8 and NVFP4; of mixed blocks
OTHER = {
    "mean of 1": ((0.6, 0.6), (0.6, 0.6)),
    "uniform": ((0.4, 1.5), (2.0, 0.4)),
    "laplace": ((0.4, 0.4), (0.4, 1.5)),
    "gelu": ((0.4, 0.6), (0.4, 1.0)),
    "swiglu": ((0.6, 0.4), (0.4, 2.6)),
    "low rank": ((0.6, 0.6), (0.6, 0.6)),
    "channels": ((1.3, 0.4), (0.6, 0.6)),
    "rows": ((7.5, 0.4), (9.5, 0.4)),  # blocks of one row know nothing of the others
    "zeros": ((2.3, 0.4), (1.6, 0.4)),  # that err by nothing
}


@pytest.mark.parametrize("name", OTHER)
def test_other_data_are_predicted_within_known_limits(name):
    pair = Pair(other_data()[name], torch.randn(256, 512, generator=torch.Generator().manual_seed(9)))
    plain = (*EVEN_GRIDS, *FLOATS[:2], *BLOCKS[:2])
    for (low, high), named in zip(OTHER[name], (plain, BLOCKS[2:3]), strict=True):
        for names in named:
            assert -low <= pair.predicted(names) - pair.measured(names) <= high, names


# Counting zeros


def test_the_seeds_model_counts_zeros():
    step = 2 * 32 / 255
    lost = zero_probability(step, 1.0)
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert lost == pytest.approx((x / step).round().eq(0).double().mean().item(), abs=0.002)
    of = OperandStatistics(
        count=1e6, absmax=32.0, center=0.0, sigma=1.0, power=1.0, bulk_power=1.0, outlier_share=1e-6
    )
    found = predict_snr_db(("int8", of), ("int8", of), model="zeros")
    assert found == zeros_snr_db(lost, lost) == pytest.approx(14.4, abs=0.05)
    assert -20 * math.log10(2 * lost) == pytest.approx(14.0, abs=0.05)  # its short form
    calibrated = predict_snr_db(("int8", of), ("int8", of))
    assert calibrated == pytest.approx(19.8, abs=0.1)


def test_the_seeds_model_of_one_unquantised_operand():
    of = statistics(with_outliers(32, 13, 1))
    lost = zero_probability(2 * of.absmax / 15, of.sigma, of.center)
    found = predict_snr_db(("int4", of), ("fp32", of), model="zeros")
    assert found == pytest.approx(-20 * math.log10(lost))
    assert zeros_snr_db(0.0, 0.0) == math.inf


@pytest.mark.parametrize("name", ["fp8e4m3", "nvfp4e2m1b", "int8b", "int8e5m2b"])
def test_the_seeds_model_refuses_other_grids(name):
    of = statistics(with_outliers(32, 13, 1))
    with pytest.raises(UserError, match=r"evenly spaced grids with one scale, not quantizer .*calibrated"):
        predict_snr_db((name, of), ("int8", of), model="zeros")


# Ends of the scale


def test_unquantised_operands():
    of = statistics(with_outliers(32, 13, 1))
    assert predict_snr_db(("fp32", of), ("fp32", of)) == math.inf
    assert predict_snr_db(("fp32", replace(of, power=math.nan)), ("fp32", of)) == math.inf
    one = predict_snr_db(("fp32", of), ("int8", of))
    assert one == pytest.approx(predict_snr_db(("int8", of), ("int8", of)) + 3.0, abs=0.1)
    assert operand_noise("fp32", of).all == pytest.approx(of.power * 2.0**-18)


def test_predictions_are_capped():
    of = OperandStatistics(
        count=100.0, absmax=1.0, center=1.0, sigma=0.0, power=1.0, bulk_power=1.0, outlier_share=0.0
    )
    assert predict_snr_db(("int8", of), ("int8", of)) == MAX_DB
    assert predict_snr_db(("int8", of), ("int8", of), model="zeros") == MAX_DB


@pytest.mark.parametrize("signal", ["bulk", "all"])
@pytest.mark.parametrize("model", ["calibrated", "zeros"])
def test_nothing_is_predicted_of_numbers_that_are_not_finite_or_of_no_signal(signal, model):
    of = statistics(with_outliers(32, 13, 1))
    broken = [replace(of, **{column: value}) for column in COLUMNS for value in (math.nan, math.inf)]
    nothing = statistics(torch.zeros(8, 8))
    for other in (*broken, nothing):
        for left, right in ((of, other), (other, of)):
            assert math.isnan(predict_snr_db(("int8", left), ("int8", right), signal=signal, model=model))


def test_a_bulk_of_zeros_has_no_signal_but_the_whole_tensor_has():
    sparse = torch.zeros(256, 512)
    sparse[:, ::16] = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    pair = Pair(sparse, torch.randn(256, 512, generator=torch.Generator().manual_seed(2)), "all")
    of, other = pair.statistics
    assert math.isnan(predict_snr_db(("int8", of), ("int8", other), signal="bulk"))
    for names in (*EVEN_GRIDS, ("fp8e4m3", "fp8e4m3"), BLOCKS[0]):
        assert pair.predicted(names) == pytest.approx(pair.measured(names), abs=2.0)


def test_an_operand_of_zeros_does_not_err():
    assert operand_noise("nvfp4e2m1b", statistics(torch.zeros(8, 8))) == (0.0, 0.0)


def test_blocks_below_the_range_of_their_scales_are_lost():
    of = replace(statistics(torch.randn(64, 64)), absmax=1e5, outlier_share=1 / 4096)
    assert operand_noise("nvfp4e2m1b", of).bulk == of.bulk_power
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 3e6
    assert quantizer("nvfp4e2m1bnosr")(x)[1:].eq(0).double().mean() > 0.9


@pytest.mark.parametrize(
    "name", ["1p58bit", "int8:q_scalar=0.5", "nvfp4e2m1bnosr:4over6", "fp4e2m1b:seed_compat"]
)
def test_a_quantizer_without_a_model_is_refused_in_one_line(name):
    of = statistics(with_outliers(32, 13, 1))
    with pytest.raises(UserError, match="has no noise model: use one of") as caught:
        predict_snr_db((name, of), ("int8", of))
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_quantizer_is_refused():
    of = statistics(with_outliers(32, 13, 1))
    with pytest.raises(UserError, match="unknown quantizer 'int9'"):
        predict_snr_db(("int9", of), ("int8", of))


def test_predictions_of_72_products_make_few_calls():
    """11,462 calls of functions. They are counted, because times differ between machines."""
    candidates = [
        ("int4", "int4:sr"),
        ("nvfp4e2m1bnosr", "nvfp4e2m1b"),
        ("int8", "int8:sr"),
        ("fp8e4m3", "fp8e5m2"),
        ("int8e5m2b", "int8e5m2b:sr"),
    ]
    base = statistics(with_outliers(32, 13, 1))

    def predict(step):
        for layer in range(24):
            input, weight, grad_output = (
                replace(base, absmax=base.absmax * (1 + 0.01 * step + 0.001 * layer + 0.1 * role))
                for role in range(3)
            )
            for operand, gradient in candidates:
                predict_snr_db((operand, input), (operand, weight))
                predict_snr_db((gradient, grad_output), (operand, weight))
                predict_snr_db((gradient, grad_output), (operand, input))

    predict(step=0)  # what is computed once for each format
    profile = cProfile.Profile()
    profile.runcall(predict, step=1)
    calls = pstats.Stats(profile).total_calls
    assert calls < 15_000
