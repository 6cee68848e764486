"""Stochastic rounding is right for small elements, and with `unbiased` for every element."""

import math
from fractions import Fraction

import pytest
import torch
from quick_cases import slow_except

from megalowbit.formats.codes import stochastic_codes
from megalowbit.formats.element import E2M1, E4M3, INT8
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey, random_fractions

NAMES = (
    *("nvfp4e2m1b:unbiased", "nvfp4e2m1b:unbiased:tile16", "mxfp4e2m1b:unbiased", "fp4e2m1b:unbiased"),
    *("int8b:unbiased", "int8:unbiased", "fp8e4m3:unbiased", "fp8e5m2b:unbiased", "int8e5m2b:unbiased"),
)
WITHOUT_KERNELS = ("mxfp8e4m3b:unbiased", "nvfp4e2m1b:4over6:unbiased", "nvfp4e2m1b:token_scale:unbiased")


@pytest.fixture(scope="module")
def every_fraction():
    """All values that the random number may have."""
    return torch.arange(2**24, dtype=torch.int32)


def lognormal(sigma, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(sigma * torch.randn(16, 128, generator=generator, dtype=torch.float64))
    return (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).sign()).float()


def student_t(dof):
    generator = torch.Generator().manual_seed(5)
    normal, *others = torch.randn(dof + 1, 16, 128, generator=generator, dtype=torch.float64)
    return (normal / torch.stack(others).square().mean(0).sqrt()).float()


def one_outlier(*_):
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)) * 1e-5
    x[:, ::16] = 1.0
    return x


def subnormal(*_):
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(2)) * 2.0**-128


DATA = {
    "log-normal 1": lambda: lognormal(1),
    "log-normal 3": lambda: lognormal(3),
    "log-normal 5": lambda: lognormal(5),
    "one outlier in a block": one_outlier,
    "subnormal": subnormal,
    "Student's t, 2 degrees of freedom": lambda: student_t(2),
    "Laplace": lambda: (
        lognormal(0) * torch.empty(16, 128).exponential_(generator=torch.Generator().manual_seed(4))
    ),
}


@pytest.mark.parametrize(
    ("element", "numbers"),
    [
        pytest.param(E2M1, (1e-5, 3.4), id="e2m1"),
        pytest.param(E2M1, (2.0**-23, 0.3, 5.99), id="e2m1, more numbers", marks=pytest.mark.slow),
        pytest.param(E4M3, (2.0**-20, 147.3), id="e4m3", marks=pytest.mark.slow),
        pytest.param(INT8, (1e-5, 0.3, -126.9), id="int8", marks=pytest.mark.slow),
    ],
)
def test_the_expected_value_over_every_random_number_is_the_number(every_fraction, element, numbers):
    for number in torch.tensor(numbers).tolist():  # as fp32
        codes = stochastic_codes(torch.full(every_fraction.shape, number), every_fraction, element)
        counts = torch.bincount(codes.int(), minlength=256).tolist()
        drawn = [(element.code_values()[code], count) for code, count in enumerate(counts) if count]
        assert len(drawn) == 2
        mean = sum(Fraction(value) * count for value, count in drawn) / 2**24
        gap = Fraction(abs(drawn[0][0] - drawn[1][0]))
        # a step of the random number, and what the real-valued code has lost: it has 24 bits
        lost = 0 if number < element.grid[1] else Fraction(len(element.grid), 2**24)
        assert abs(mean - Fraction(number)) <= gap * (Fraction(1, 2**24) + lost)


@pytest.mark.parametrize("exponent", slow_except([10], [10, 17, 24]))
def test_a_small_number_is_rounded_up_as_often_as_it_should_be(every_fraction, exponent):
    small = torch.full(every_fraction.shape, 0.5 * 2.0**-exponent)  # a part of E2M1's first gap
    assert stochastic_codes(small, every_fraction, E2M1).sum(dtype=torch.int64) == 2 ** (24 - exponent)


def test_the_random_numbers_of_neighbours_are_uniform_and_nearly_independent():
    drawn = random_fractions(1 << 15, RandomKey(5), torch.device("cpu")).double() / 2**24
    count = drawn.shape[0]
    assert (drawn.mean(0) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / count)
    correlations = torch.corrcoef(drawn.T) - torch.eye(16)
    # they share bytes: 1/256 for the next element and 1/65536 for the one after it
    assert correlations.abs().max() < 1 / 256 + 5 / math.sqrt(count)
    below = drawn < torch.tensor([2.0**-k for k in range(2, 12)]).view(-1, 1, 1)
    for threshold, hits in zip(range(2, 12), below, strict=True):
        expected = drawn.numel() * 2.0**-threshold
        assert abs(hits.sum() - expected) < 6 * math.sqrt(expected)


def expectation(x, name, draws):
    """Mean of each element over many draws."""
    chosen, total = quantizer(name), torch.zeros(x.shape, dtype=torch.float64)
    for step in range(draws):
        total += chosen.quantize(x, random_key=RandomKey(11, step)).dequantize().double()
    return total / draws


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, marks=() if (place + other) % 5 == 0 else pytest.mark.slow)
        for place, name in enumerate(NAMES)
        for other, data in enumerate(DATA)
    ]
    + [pytest.param(name, "log-normal 3", marks=pytest.mark.slow) for name in WITHOUT_KERNELS],
)
def test_no_element_is_further_from_its_mean_than_chance_allows(name, data):
    x = DATA[data]()
    if data == "subnormal" and not name.startswith(("nvfp4", "mxfp4")):
        x = x * 2.0**24  # fp32 scales are normal numbers only
    draws = 1500
    mean, exact = expectation(x, name, draws), x.double()
    # An element between neighbours a gap apart deviates by gap·√(f(1 - f)) ≤ √(gap·|x|).
    result = quantizer(name).quantize(x, random_key=RandomKey(0))
    gap = gap_of(result, x)
    chance = (gap * exact.abs()).minimum(gap.square() / 4).div(draws).sqrt()
    # A gap may be drawn once though its chance is small: then the mean is a gap / draws off.
    allowed = 6 * chance + 4 * gap / draws + exact.abs() * 2.0**-20 + 2.0**-149
    assert ((mean - exact).abs() <= allowed).all()
    # The sums of the tensor and of its codes differ by chance only; large elements decide them.
    difference, chance_of_sum = (mean - exact).sum(), chance.square().sum().sqrt()
    assert difference.abs() < 5 * chance_of_sum + 2.0**-20 * exact.abs().sum()
    # Over all elements, each in its own gaps, errors average out far below what one may have.
    variance = ((gap * exact.abs()).minimum(gap.square() / 4) / draws / gap.square()).sum()
    assert ((mean - exact) / gap).sum().abs() < 5 * variance.sqrt() + 2.0**-20 * x.numel()


def gap_of(result, x):
    """The largest gap that the numbers beside each element may have: fp64, of x's shape."""
    format, rows, cols = result.format, *x.shape
    scale = (result.scales.float() if result.scales.numel() else torch.ones(1, 1)).double()
    if format.scale == "e8m0":
        scale = 2.0 ** (result.scales.view(torch.uint8).double() - 127)
    if result.tensor_scale is not None:
        scale = scale * result.tensor_scale.double()
    height, width = format.block or (rows, cols)
    is_e5m2 = torch.signbit(scale)
    spread = [
        each.repeat_interleave(height, 0).repeat_interleave(width, 1) for each in (scale.abs(), is_e5m2)
    ]
    scale, is_e5m2 = (each[:rows, :cols] for each in spread)
    grids = {True: (2.0**-16, 0.25), False: GAPS[format.element.name]}
    least, relative = (torch.where(is_e5m2, a, b) for a, b in zip(grids[True], grids[False], strict=True))
    return torch.maximum(least * scale, relative * x.double().abs()) * (1 + 2.0**-10)


# Least gap of an element format, and the largest one relative to the number below it.
GAPS = {
    "e2m1": (0.5, 0.5), "e4m3": (2.0**-9, 0.125), "e5m2": (2.0**-16, 0.25), "int8": (1.0, 0.0),
    "int8_e5m2": (1.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sigma"),
    [
        pytest.param(name, sigma, marks=() if (place + sigma // 2) % 2 else pytest.mark.slow)
        for place, name in enumerate(["nvfp4e2m1b", "mxfp4e2m1b", "fp4e2m1b", "int8b", "int8e5m2b:block32"])
        for sigma in (3, 5)
    ],
)
def test_the_gain_of_small_elements_is_one_with_the_option_and_without(name, sigma):
    x, draws, gains = lognormal(sigma, seed=3), 1000, []
    for each in (f"{name}:unbiased", f"{name}:sr"):
        gap = gap_of(quantizer(each).quantize(x, random_key=RandomKey(0)), x)
        share = x.double().abs() / gap
        is_small = (share < 1 / 520) & (share > 2.0**-20)
        assert is_small.sum() > 10
        total = share[is_small].sum()
        drawn = (expectation(x, each, draws) / gap * x.sign())[is_small].sum()
        gains.append(drawn / total)
    for gain in gains:
        assert abs(gain - 1) < 5 * (total * draws).rsqrt()  # a sum of rare ups


BLOCKS = (
    *("nvfp4e2m1b", "mxfp4e2m1b", "fp4e2m1b", "int8b:block32", "fp8e5m2b"),
    *("nvfp4e2m1b:4over6", "mxfp8e4m3b", "ue5m3fp4e2m1b", "hif4"),
)


def gain_of_blocks(name, sigma):
    """Sums of blocks of positive log-normal numbers, each over its largest: gain, and its standard error."""
    x, copies, ratios = lognormal(sigma, seed=6)[:4].abs(), 2000, []
    width = quantizer(name).encoding.format.block[1]
    blocks = x.double().unflatten(1, (-1, width))
    largest = blocks.amax(2)
    for step in range(8):
        made = quantizer(name).quantize(x.repeat(copies, 1), random_key=RandomKey(13, step))
        sums = made.dequantize().double().view(copies, 4, -1, width).sum(3)
        ratios.append((sums / largest).sum((1, 2)) / (blocks.sum(2) / largest).sum())
    drawn = torch.cat(ratios)
    return float(drawn.mean()), float(drawn.std()) / math.sqrt(drawn.numel())


@pytest.mark.parametrize("sigma", [1, 3])
@pytest.mark.parametrize(
    "name",
    [each if place < 2 else pytest.param(each, marks=pytest.mark.slow) for place, each in enumerate(BLOCKS)],
)
def test_sums_of_positive_heavy_tails_have_a_gain_of_one_within_a_thousandth(name, sigma):
    gain, chance = gain_of_blocks(f"{name}:unbiased", sigma)
    assert 4 * chance < 0.001  # so a gain that is off by a thousandth would show
    assert abs(gain - 1) < min(0.001, 5 * chance + 2.0**-20)


def test_without_the_option_saturated_elements_lose_more_than_a_thousandth():
    gain, chance = gain_of_blocks("nvfp4e2m1b", 3)
    assert gain + 5 * chance < 0.996


def test_no_block_is_too_small_for_its_scale():
    x = torch.full((2, 64), 2.0**-140)
    x[0] = 2.0**-127
    mean = expectation(x, "nvfp4e2m1b:unbiased", 3000)
    assert mean[1].mean() == pytest.approx(2.0**-140, rel=0.5)
    assert not quantizer("nvfp4e2m1b").quantize(x, random_key=RandomKey(0)).dequantize()[1].any()


def test_whole_codes_never_move():
    for element in (E2M1, E4M3, INT8):
        grid = torch.tensor(element.grid)
        for fraction in (0, 2**23, 2**24 - 1):
            codes = stochastic_codes(grid, torch.full(grid.shape, fraction, dtype=torch.int32), element)
            assert codes.tolist() == list(range(len(grid)))
