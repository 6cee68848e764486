"""Pooling on one rank, and pooled numbers against those of all elements together; see also distributed/."""

import math

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.philox import RandomKey
from megalowbit.speculation.estimator import estimate
from megalowbit.speculation.exchange import HIGHEST_DB, MOMENTS, Exchange, Rounding, Verification, pooled
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.probe import ROLES, RankFindings
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OperandStatistics

CPU = torch.device("cpu")
ALL = EstimatorSettings(sample=1 << 20)


def described(x):
    return estimate(x, ALL, RandomKey(0), quantizers=["int8"])


def moments(row):
    """As ranks sum them, written out."""
    of = dict(zip(COLUMNS, row, strict=False))
    square = of["sigma"] ** 2 + of["center"] ** 2
    values = [of["center"], square, of["bulk_power"], *row[len(COLUMNS) :]]
    return [of["count"], *(of["count"] * value for value in values)]


def sums(rows):
    return [math.fsum(column) for column in zip(*map(moments, rows), strict=True)]


def tensors(count, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, 32 + 8 * each, generator=generator) for each in range(count)]


def test_one_rank_gets_back_what_it_gave():
    rows = {role: described(x) for role, x in zip(ROLES, tensors(3), strict=True)}
    energies = torch.tensor([8.0, 2.0, 4.0, 1.0, 0.5], dtype=torch.float64)
    sheet = RankFindings(
        statistics={("b", role): row for role, row in rows.items()},
        energies={("b", "output"): energies, ("b", "grad_weight"): None},
    )
    exchange = Exchange(["a", "b"], {}, 1)
    assert exchange.layers == ("a", "b")
    findings = exchange.pool(sheet, {("b", "output"): (False, True)}, ["int8"], CPU)
    assert set(findings.statistics) == {("b", role) for role in ROLES}
    for role, row in rows.items():
        found = findings.statistics["b", role]
        *numbers, error = row.tolist()
        for name, value in zip(COLUMNS, numbers, strict=True):
            assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
        assert found.errors == (pytest.approx(error, rel=1e-12),)
    assert findings.verified == {("b", "output"): Verification(8.0, 2.0, 4.0, (Rounding(1.0, 0.5),))}
    assert findings.ran == {("b", "output"), ("b", "grad_weight")}
    assert findings.unquantized["b", "output"] == (False, True)
    assert findings.unquantized["a", "output"] == (False, False)
    assert set(findings.unquantized) == {(layer, product) for layer in "ab" for product in PRODUCTS}


def test_ranks_together_are_as_one_with_all_elements():
    """Data-parallel ranks with as much data each: sums and maxima exactly, the bulk as a mixture."""
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(4096, generator=generator) * scale for scale in (1.0, 1.0, 1.0)]
    parts[1][7] = 55.0
    rows = [described(part).tolist() for part in parts]
    found = pooled(sums(rows), max(row[COLUMNS.index("absmax")] for row in rows))
    whole = torch.cat(parts).double()
    assert found.count == whole.numel()
    assert found.absmax == 55.0
    assert found.sigma == pytest.approx(1.0, rel=0.03)
    bulk = whole[whole.abs() < 6]
    assert found.bulk_power == pytest.approx(bulk.square().mean().item(), rel=1e-3)
    assert found.ratio == pytest.approx(55.0 / found.sigma)


def test_bulks_of_different_centers_and_sizes_are_a_mixture():
    rows = [
        [1000.0, 9.0, 1.0, 2.0, 5.0, 0.1, 0.2],
        [3000.0, 7.0, -1.0, 4.0, 16.0, 0.3, 0.6],
    ]
    found = pooled(sums(rows), 9.0)
    center = (1 * 1 + 3 * -1) / 4
    variance = (1 * (4 + 1) + 3 * (16 + 1)) / 4 - center**2
    assert found.center == pytest.approx(center)
    assert found.sigma == pytest.approx(math.sqrt(variance))
    assert found.bulk_power == pytest.approx((5 + 3 * 16) / 4)
    assert found.errors == pytest.approx(((0.1 + 3 * 0.3) / 4, (0.2 + 3 * 0.6) / 4))


def test_copies_of_an_operand_count_as_often_and_change_nothing():
    row = described(tensors(1)[0]).tolist()
    once, twice = pooled(sums([row]), row[1]), pooled(sums([row, row]), row[1])
    assert twice.count == 2 * once.count
    for name in COLUMNS[1:]:
        assert getattr(twice, name) == pytest.approx(getattr(once, name), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_number_that_is_not_finite_spoils_the_operand_everywhere(bad):
    good, spoiled = tensors(2)
    spoiled[0, 0] = bad
    rows = [described(each).tolist() for each in (good, spoiled)]
    total = [sum(column) for column in zip(*map(moments, rows), strict=True)]
    found = pooled(total, rows[0][1])  # MAX may have dropped the NaN
    assert not found.is_finite
    assert math.isnan(found.ratio)


def test_the_spread_of_equal_numbers_is_no_root_of_a_negative():
    found = pooled(moments([10.0, 0.3, 0.3, 0.0, 0.09]), 0.3)
    assert found.sigma == pytest.approx(0.0, abs=1e-8)


def test_an_operand_without_samples_or_elements_is_left_out():
    empty = torch.zeros(0, 8)
    sheet = RankFindings(statistics={("a", "input"): described(empty)}, energies={("a", "output"): None})
    findings = Exchange(["a"], {}, 1).pool(sheet, {}, [], CPU)
    assert findings.statistics == {}
    assert findings.ran == {("a", "output")}
    assert findings.verified == {}


def test_pooled_statistics_have_every_column():
    assert len(MOMENTS) + 1 == len(COLUMNS)  # the largest magnitude travels apart
    assert isinstance(pooled([1.0] * len(MOMENTS), 1.0), OperandStatistics)


@pytest.mark.parametrize(
    ("energies", "measured"),
    [
        ((100.0, 1.0, 10.0), 20.0),
        ((1.0, 2.0, 4.0), -3.0103),
        ((1.0, 0.0, 1.0), HIGHEST_DB),
        ((1.0, 1e-30, 1.0), HIGHEST_DB),
        ((0.0, 1.0, 1.0), math.nan),
        ((0.0, 0.0, 0.0), math.nan),
        ((1.0, math.nan, 1.0), math.nan),
        ((math.inf, 1.0, math.inf), math.nan),
    ],
)
def test_energies_in_decibels(energies, measured):
    assert Verification(*energies).measured_db == pytest.approx(measured, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("signal", "expected", "rounding", "correction"),
    [
        (100.0, 10.0, (1.0, 1.0), 10.0),  # the signal is larger than that of independent operands
        (10.0, 10.0, (100.0, 1.0), -20.0),  # the noise is larger than that of independent errors
        (100.0, 10.0, (10.0, 1.0), 0.0),  # both: the SNR is as predicted
        (1.0, 1.0, (0.0, 0.0), math.nan),  # no noise
        (0.0, 1.0, (1.0, 1.0), math.nan),
        (1.0, 1.0, (math.nan, 1.0), math.nan),
        (math.inf, 1.0, (1.0, 1.0), math.nan),
    ],
)
def test_a_correction_compares_signal_and_noise_with_those_of_independent_operands(
    signal, expected, rounding, correction
):
    found = Verification(signal, 5.0, expected, (Rounding(7.0, 3.0), Rounding(*rounding)))
    assert found.correction_db(1) == pytest.approx(correction, nan_ok=True)


def test_a_ranks_problem_is_raised_as_one_that_all_ranks_have():
    with pytest.raises(UserError, match="cannot take part") as caught:
        Exchange(["a"], {}, problem="this rank cannot take part: mend it")
    assert caught.value.is_on_all_ranks


def test_a_model_without_layers_is_refused():
    with pytest.raises(UserError, match=r"no BitLinear layer .*convert"):
        Exchange([], {})
