"""What a probe finds, against the same computed by hand from whole matrices in float64."""

import numpy as np
import pytest
import torch

from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.layers.matmul.slots import Probe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.speculation.estimator import sampled_places
from megalowbit.speculation.exchange import Verification
from megalowbit.speculation.precisions import OPERANDS, PRODUCTS, operand_quantizer
from megalowbit.speculation.probe import ENERGIES, ROUNDING, PrecisionCheck, ProductProbe, RankFindings
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS

TOKENS, INPUTS, OUTPUTS = 96, 80, 112
ALL = EstimatorSettings(sample=1 << 20)  # every element once
KEY = RandomKey(5, 7)
CANDIDATES = ("int8", "nvfp4")


def precision_check(*, size=1 << 20, step=3, estimator=ALL):
    return PrecisionCheck(
        step=step, candidates=CANDIDATES, estimator=estimator, verify_size=size,
        findings=RankFindings(),
    )  # fmt: skip


def operands(*, outliers=3, seed=0, dtype=torch.bfloat16, scale=1.0):
    """The three operands: Gaussian, with some elements forty times as large."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for role, shape in (
        ("input", (TOKENS, INPUTS)),
        ("weight", (OUTPUTS, INPUTS)),
        ("grad_output", (TOKENS, OUTPUTS)),
    ):
        x = torch.randn(shape, generator=generator) * scale
        places = torch.randint(x.numel(), (outliers,), generator=generator)
        x.view(-1)[places] *= 40
        made[role] = x.to(dtype)
    return made


def matrices(product, of):
    """Left (rows, inner) and right (cols, inner) of a product, as the formula in the layers says."""
    left, right = (of[role] for role in OPERANDS[product])
    return {
        "output": lambda: (left, right),
        "grad_input": lambda: (left, right.t()),
        "grad_weight": lambda: (left.t(), right.t()),
    }[product]()


def run(probe, x, name, *, is_packed=False):
    """Show a probe everything in a layer's order; the quantised operands in float64."""
    factors = {}
    for role in ("input", "weight", "grad_output"):
        maximum = probe.observe_operand(role, x[role])
        assert maximum.dtype == torch.float32
        assert maximum == x[role].abs().max()
        factor = MatmulOperand(quantizer(name).quantize(x[role], operand_dtype=torch.bfloat16))
        factors[role] = factor.packed() if is_packed else factor
    values = {role: factor.tensor.dequantize() for role, factor in factors.items()}
    for product in PRODUCTS:
        left, right = matrices(product, {role: each.double() for role, each in values.items()})
        result = (left @ right.t()).to(torch.bfloat16)
        left, right = (factors[role] for role in OPERANDS[product])
        probe.observe_product(product, left, right, result, None)
    return {role: each.double() for role, each in values.items()}


def db(found):
    signal, noise, *_ = found.tolist()
    return 10 * np.log10(signal / noise)


@pytest.mark.parametrize("shape", ["matrix", "batch"])
def test_statistics_of_each_operand_are_those_of_its_elements(shape):
    x, check = operands(), precision_check(size=0)
    given = {role: each.view(4, -1, each.shape[1]) if shape == "batch" else each for role, each in x.items()}
    probe = ProductProbe(check, "h.0")
    assert isinstance(probe, Probe)
    for role, each in given.items():
        probe.observe_operand(role, each)
    assert set(check.findings.statistics) == {("h.0", role) for role in x}
    for role, each in x.items():
        found = dict(zip(COLUMNS, check.findings.statistics["h.0", role].tolist(), strict=False))
        values = each.double().numpy()
        assert found["count"] == values.size
        assert found["absmax"] == np.abs(values).max()
        assert found["sigma"] == pytest.approx(1.0, rel=0.03)
        bulk = values[np.abs(values) < 6]
        assert found["bulk_power"] == pytest.approx(np.square(bulk).mean(), rel=1e-9)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["int8", "fp8e5m2", "nvfp4e2m1bnosr", "fp32"])
def test_energies_of_the_bulk_leave_outliers_out_of_both_sides(name, is_packed):
    x, check = operands(dtype=torch.float32), precision_check()
    quantized = run(ProductProbe(check, "a"), x, name, is_packed=is_packed)
    is_bulk = {role: each.double().abs() <= 6 for role, each in x.items()}  # outliers are far beyond
    assert all((~each).sum() >= 2 for each in is_bulk.values())
    exact_of = {role: each.double() * is_bulk[role] for role, each in x.items()}
    made_of = {role: each * is_bulk[role] for role, each in quantized.items()}
    for product in PRODUCTS:
        left, right = matrices(product, exact_of)
        made_left, made_right = matrices(product, made_of)
        exact, made = left @ right.t(), made_left @ made_right.t()
        power = left.square().mean() * right.square().mean()
        found = check.findings.energies["a", product]
        assert found.dtype == torch.float64
        assert len(found) == len(ENERGIES) + len(ROUNDING) * len(CANDIDATES)
        signal, noise = exact.square().sum(), (made - exact).square().sum()
        torch.testing.assert_close(found[:2], torch.stack([signal, noise]), rtol=1e-6, atol=1e-20)
        assert found[2] == pytest.approx(exact.numel() * left.shape[1] * power.item(), rel=1e-9)


@pytest.mark.parametrize("unquantized", [(False, False), (True, False), (False, True)])
def test_the_noise_at_each_candidate_is_that_of_full_products(unquantized):
    """Whatever the products of the step run at; INT8 and NVFP4 rounded to nearest are the same each time."""
    x, check = operands(dtype=torch.float32), precision_check()
    run(ProductProbe(check, "a", dict.fromkeys(PRODUCTS, unquantized)), x, "fp32")
    is_bulk = {role: each.double().abs() <= 6 for role, each in x.items()}
    exact_of = {role: each.double() * is_bulk[role] for role, each in x.items()}
    for candidate, (noise, expected) in zip(
        CANDIDATES, check.findings.energies["a", "output"][3:].view(-1, 2), strict=True
    ):
        exact, made = [], []
        for role, is_exact in zip(OPERANDS["output"], unquantized, strict=True):
            name = operand_quantizer(candidate, role)
            exact.append(exact_of[role])
            values = x[role] if is_exact else quantizer(name)(x[role])
            made.append(values.double() * is_bulk[role])
        left, right = (quantised - values for quantised, values in zip(made, exact, strict=True))
        error = made[0] @ made[1].t() - exact[0] @ exact[1].t()
        parts = left.norm() ** 2 * exact[1].norm() ** 2 + exact[0].norm() ** 2 * right.norm() ** 2
        parts = parts + left.norm() ** 2 * right.norm() ** 2
        # less noise than that of independent operands is not fully believed
        signal, _, independent = check.findings.energies["a", "output"][:3]
        found, usual = error.square().sum(), parts / INPUTS * signal / independent
        if found >= usual:
            assert noise == pytest.approx(found.item(), rel=1e-9)
        else:
            assert found < noise <= min(usual * (1 + 1e-9), found * 1.1)
        assert expected == pytest.approx(parts.item() / INPUTS, rel=1e-9)


@pytest.mark.parametrize("product", PRODUCTS)
def test_columns_are_rounded_in_the_blocks_of_full_rows(product):
    """Of 24 columns the probe sees every fourth; a block of NVFP4 has 16 neighbours of one row."""
    x, whole, part = operands(outliers=9), precision_check(), precision_check(size=24)
    for check in (whole, part):
        run(ProductProbe(check, "a"), x, "fp32")
    found, expected = (check.findings.energies["a", product] for check in (part, whole))
    for at in (3, 5):
        relative = (found[at] / found[0]) / (expected[at] / expected[0])
        assert 10 * abs(np.log10(relative.item())) < 2


def test_the_scale_of_a_shard_is_that_of_the_full_operand():
    x, alone, shard = operands(outliers=0), precision_check(), precision_check()
    ProductProbe(alone, "a").observe_operand("input", x["input"])
    amax = ProductProbe(shard, "a").observe_operand("input", x["input"], lambda local: 10 * local)
    assert amax == 10 * x["input"].abs().max().float()
    before, now = (check.findings.statistics["a", "input"] for check in (alone, shard))
    assert now[COLUMNS.index("absmax")] == 10 * before[COLUMNS.index("absmax")]
    at_int8 = len(COLUMNS)
    assert (now / before)[at_int8] == pytest.approx(100, rel=0.05)
    assert torch.equal(now[2:at_int8], before[2:at_int8])


def test_a_sample_estimates_the_statistics_of_the_full_operands():
    x, whole, part = operands(outliers=0), precision_check(), precision_check(size=24)
    for check in (whole, part):
        run(ProductProbe(check, "a"), x, "int8")
    for product in PRODUCTS:
        found, expected = (check.findings.energies["a", product] for check in (part, whole))
        assert found[0] < 0.2 * expected[0]
        assert db(found) == pytest.approx(db(expected), abs=0.6)
        # of independent operands the signal is the expected one
        assert found[0] == pytest.approx(found[2].item(), rel=0.3)


def test_without_verification_products_are_predicted_and_not_compared():
    check = precision_check(size=0)
    run(ProductProbe(check, "a"), operands(), "int8")
    assert check.findings.energies == {("a", product): None for product in PRODUCTS}
    assert len(check.findings.statistics) == 3


def test_only_samples_are_kept_until_backward():
    x, check = operands(), precision_check(size=8)
    probe = ProductProbe(check, "a")
    factors = {}
    for role in ("input", "weight"):
        probe.observe_operand(role, x[role])
        factors[role] = MatmulOperand(quantizer("int8").quantize(x[role]))
    result = x["input"].float() @ x["weight"].float().t()
    probe.observe_product("output", factors["input"], factors["weight"], result, None)
    samples = probe._samples.values()
    kept = [each for sample in samples for each in (sample.values, *sample.rounded)]
    assert {sample.values.shape for sample in samples} == {(8, TOKENS), (8, OUTPUTS)}
    assert sum(each.numel() for each in kept) == 8 * (TOKENS + OUTPUTS) * (1 + len(CANDIDATES))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept)
    before = {key: sample.values.clone() for key, sample in probe._samples.items()}
    for each in x.values():
        each.zero_()  # the layer's own memory, free to be used again
    assert all(torch.equal(probe._samples[key].values, value) for key, value in before.items())


def test_a_product_whose_operand_was_not_shown_is_not_compared():
    x, check = operands(), precision_check()
    probe = ProductProbe(check, "a")
    probe.observe_operand("grad_output", x["grad_output"])
    factor = MatmulOperand(quantizer("int8").quantize(x["grad_output"]))
    probe.observe_product("grad_weight", factor, factor, x["grad_output"], None)
    assert check.findings.energies == {("a", "grad_weight"): None}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_ends_as_numbers_that_are_not(bad):
    x, check = operands(), precision_check()
    x["input"][3, 5] = bad
    probe = ProductProbe(check, "a")
    for role in ("input", "weight"):
        probe.observe_operand(role, x[role])
    factors = [MatmulOperand(quantizer("int8").quantize(x[role])) for role in ("input", "weight")]
    probe.observe_product("output", *factors, torch.zeros(TOKENS, OUTPUTS), None)
    assert not check.findings.statistics["a", "input"][1:].isfinite().any()
    assert check.findings.statistics["a", "weight"].isfinite().all()
    signal, noise, *rest = check.findings.energies["a", "output"].tolist()
    assert np.isnan(Verification(signal, noise, rest[0]).measured_db)


def test_empty_operands_are_no_error():
    x, check = operands(), precision_check()
    x["input"], x["grad_output"] = x["input"][:0], x["grad_output"][:0]
    probe = ProductProbe(check, "a")
    for role in x:
        probe.observe_operand(role, x[role])
    factors = {role: MatmulOperand(quantizer("int8").quantize(each)) for role, each in x.items()}
    probe.observe_product("output", factors["input"], factors["weight"], torch.zeros(0, OUTPUTS), None)
    probe.observe_product(
        "grad_weight", factors["grad_output"], factors["input"], torch.zeros(OUTPUTS, INPUTS), None
    )
    assert not check.findings.statistics["a", "input"].any()
    for product in ("output", "grad_weight"):
        assert not check.findings.energies["a", product].any()


def test_torchs_generator_is_left_alone_and_the_same_step_draws_the_same():
    x = operands()
    state, found = torch.get_rng_state(), []
    for step, layer in ((3, "a"), (3, "a"), (4, "a"), (3, "b")):
        check = precision_check(size=16, step=step, estimator=EstimatorSettings(sample=64))
        run(ProductProbe(check, layer), x, "int8")
        found.append([each.tolist() for each in check.findings.energies.values()])
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0] != found[3]


@pytest.mark.parametrize(("length", "size"), [(1000, 64), (65, 64), (129, 64), (7, 5)])
def test_places_are_one_of_each_stretch(length, size):
    places = sampled_places(length, size, KEY, torch.device("cpu")).tolist()
    assert len(places) == size
    for number, place in enumerate(places):
        assert number * length // size <= place < (number + 1) * length // size


def test_sampled_positions_are_uniform_over_the_axis():
    counts = np.zeros(10)
    for step in range(500):
        counts[sampled_places(10, 4, RandomKey(1, step), torch.device("cpu")).numpy()] += 1
    expected = np.array([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3]) * 500
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_short_axis_is_taken_whole(length):
    places = sampled_places(length, 5, KEY, torch.device("cpu"))
    assert places.tolist() == list(range(length))
