import logging
import math
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit import c_library
from megalowbit.errors import UserError
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.kernels.cpu import AdamSettings, AdamTensors

# not whether the kernels can be had: where there is a compiler, broken ones must fail
HAS_COMPILER = bool(os.environ.get("CC")) or any(map(shutil.which, ("cc", "gcc", "clang")))
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 15, 16, 17, 127, 129, 1000, 65536, 65537, 200_003)


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numbers(size, dtype=torch.float32, seed=0):
    """Numbers over many magnitudes, denormals and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 6, (size,), generator=generator).float()
    x = torch.randn(size, generator=generator) * 2.0**exponents
    x[::7] = 0
    if size > 9:
        x[1], x[2], x[8] = 1e-40, -0.0, 6e-8
    return x.to(dtype)


def item(size, dtype=torch.float32, half=torch.float16, seed=0, **changes):
    hyper = {
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "is_decoupled": True,
    }
    return AdamTensors(
        master=numbers(size, seed=seed + 1),
        gradient=numbers(size, dtype, seed=seed + 2),
        exp_avg=numbers(size, seed=seed + 3),
        exp_avg_sq=numbers(size, seed=seed + 4).square(),
        step=torch.tensor(3.0),
        half=None if half is None else torch.zeros(size, dtype=half),
        settings=AdamSettings(**{**hyper, **changes}),
    )


def by_torch(item, scale):
    """The result of torch's fused kernel for the item: master, moments and half weight."""
    master, exp_avg, exp_avg_sq = item.master.clone(), item.exp_avg.clone(), item.exp_avg_sq.clone()
    step = item.settings
    update = torch._fused_adamw_ if step.is_decoupled else torch._fused_adam_
    update(
        [master],
        [item.gradient.float().clone()],
        [exp_avg],
        [exp_avg_sq],
        [],
        [item.step + 1],
        amsgrad=False,
        maximize=False,
        lr=step.learning_rate,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=step.weight_decay,
        eps=step.epsilon,
        grad_scale=torch.tensor(scale),
        found_inf=torch.tensor(0.0),
    )
    half = None if item.half is None else torch.empty_like(item.half).copy_(master)
    return master, exp_avg, exp_avg_sq, half


def state_of(item):
    return item.master, item.exp_avg, item.exp_avg_sq, item.half


def same_bits(left, right):
    return all(
        (a is None and b is None)
        or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def test_where_there_is_a_compiler_there_are_kernels():
    assert cpu_kernels.why_unavailable() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"is_decoupled": False}, {"weight_decay": 0.0}, {"beta1": 0.4}])
def test_steps_have_the_bits_of_torchs_fused_adam(dtype, changes, threads):
    threads(1)  # with more, torch rounds the last elements of a tensor otherwise
    for size in SIZES:
        for scale in (1.0, 65536.0, 12345.678):
            one = item(size, dtype, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16, **changes)
            for number in range(2):
                expected = by_torch(one, scale)
                cpu_kernels.adam_step([one], torch.tensor(scale), torch.tensor(0.0))
                assert same_bits(state_of(one), expected), (size, scale, number)
                assert one.step == 4 + number


@given(
    size=st.integers(1, 300),
    scale=st.floats(2.0**-10, 2.0**40, width=32),
    rate=st.floats(1e-6, 1.0),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0.5, 0.9999)),
    decay=st.floats(0, 0.5),
    is_decoupled=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_any_settings_have_the_bits_of_torchs_fused_adam(
    size, scale, rate, betas, decay, is_decoupled, dtype
):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = item(
            size,
            dtype,
            learning_rate=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=decay,
            is_decoupled=is_decoupled,
        )
        expected = by_torch(one, scale)
        cpu_kernels.adam_step([one], torch.tensor(scale), torch.tensor(0.0))
    finally:
        torch.set_num_threads(before)
    assert same_bits(state_of(one), expected)


def test_a_step_is_adamw_as_written_in_float64():
    one = item(1000, torch.float16, weight_decay=0.1)
    master, gradient = one.master.double(), one.gradient.double() / 512
    mean = 0.9 * one.exp_avg.double() + 0.1 * gradient
    square = 0.95 * one.exp_avg_sq.double() + 0.05 * gradient**2
    corrected = (square / (1 - 0.95**4)).sqrt() + 1e-8
    expected = master * (1 - 1e-2 * 0.1) - 1e-2 * mean / (1 - 0.9**4) / corrected
    cpu_kernels.adam_step([one], torch.tensor(512.0), torch.tensor(0.0))
    torch.testing.assert_close(one.master.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(one.half, one.master.half())


def test_a_flagged_step_changes_nothing_even_with_nan_gradients():
    one = item(1000)
    one.gradient[3], one.gradient[999] = math.nan, math.inf
    one.half.fill_(7.0)  # not the master: what a skip would show if it wrote
    before = [tensor.clone() for tensor in (*state_of(one), one.step)]
    cpu_kernels.adam_step([one], torch.tensor(2.0), torch.tensor(1.0))
    assert same_bits((*state_of(one), one.step), before)
    assert not one.gradient[:3].isnan().any()
    cpu_kernels.adam_step([one], torch.tensor(2.0), torch.tensor(0.0))
    assert one.master[3].isnan()
    assert one.half[3].isnan()
    assert one.step == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_clearing_leaves_zeros_for_fp32_gradients_and_the_bits_of_all_else(dtype):
    sizes = SIZES[1:]
    kept = [item(size, dtype, seed=size) for size in sizes]
    cleared = [item(size, dtype, seed=size) for size in sizes]
    kept[3].gradient[2] = cleared[3].gradient[2] = math.nan
    scale, flag = torch.tensor(3.0), torch.tensor(0.0)
    cpu_kernels.adam_step(kept, scale, flag)
    cpu_kernels.adam_step(cleared, scale, flag, clears_gradients=True)
    for one, other in zip(kept, cleared, strict=True):
        assert same_bits(state_of(one), state_of(other))
        assert one.step == other.step == 4
        left = torch.zeros_like(one.gradient) if dtype == torch.float32 else one.gradient
        assert same_bits([other.gradient], [left])


def test_clearing_stops_at_the_ends_of_a_gradient():
    buffer = torch.ones(1002)
    one = item(1000)
    cpu_kernels.adam_step(
        [AdamTensors(**{**vars(one), "gradient": buffer[1:1001]})],
        torch.tensor(3.0),
        torch.tensor(0.0),
        clears_gradients=True,
    )
    assert buffer.nonzero().flatten().tolist() == [0, 1001]


def test_a_flagged_step_clears_no_gradient():
    one = item(1000)
    before = one.gradient.clone()
    cpu_kernels.adam_step([one], torch.tensor(2.0), torch.tensor(1.0), clears_gradients=True)
    assert same_bits([one.gradient], [before])


@pytest.mark.parametrize("name", ["gradient", "exp_avg", "exp_avg_sq", "half"])
def test_tensors_of_another_shape_are_refused_before_anything_is_stepped(name):
    first, wrong = item(50), item(1000)
    before = first.master.clone()
    small = AdamTensors(**{**vars(wrong), name: getattr(wrong, name)[:999]})
    with pytest.raises(UserError, match=rf"^{name} has shape \(999,\) .*\(1000,\)"):
        cpu_kernels.adam_step([first, small], torch.tensor(1.0), torch.tensor(0.0))
    assert torch.equal(first.master, before)


@pytest.mark.parametrize("size", [0, 2])
def test_a_step_count_that_is_not_one_number_is_refused(size):
    one = AdamTensors(**{**vars(item(10)), "step": torch.zeros(size)})
    with pytest.raises(UserError, match=rf"step has shape \({size},\)"):
        cpu_kernels.adam_step([one], torch.tensor(1.0), torch.tensor(0.0))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_weights_are_the_masters_rounded_to_nearest_even(half):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half)
    values = every[every.isfinite()].float()
    between = torch.nextafter(values, torch.tensor(math.inf))
    middle = values + torch.diff(values, append=values[-1:]) / 2  # ties, wherever neighbours are neighbours
    masters = torch.cat(
        [values, between, middle, torch.tensor([65519.9, 65520.0, 1e38, math.inf, -math.inf])]
    )
    for place in (0, 1):  # aligned to whole lines, and not
        one = item(len(masters) - place, half=half)
        half_weights = torch.zeros(len(masters) + 1, dtype=half)[1 : len(masters)] if place else one.half
        still = AdamTensors(
            **{
                **vars(one),
                "master": masters[place:].clone(),
                "half": half_weights,
                "settings": AdamSettings(
                    learning_rate=0.0,
                    beta1=0.9,
                    beta2=0.95,
                    epsilon=1e-8,
                    weight_decay=0.0,
                    is_decoupled=True,
                ),
            }
        )
        cpu_kernels.adam_step([still], torch.tensor(1.0), torch.tensor(0.0))
        assert torch.equal(still.half.view(torch.int16), masters[place:].to(half).view(torch.int16))


def test_bits_do_not_depend_on_the_number_of_threads(threads):
    results = []
    for count in (1, 2, 3):
        threads(count)
        items = [item(size, torch.float16, seed=size) for size in SIZES]
        cpu_kernels.adam_step(items, torch.tensor(3.0), torch.tensor(0.0))
        sums = cpu_kernels.sums_of_squares([one.master for one in items])
        main = numbers(200_003, seed=9)
        cpu_kernels.accumulate(main, numbers(200_003, seed=8), 0.3)
        results.append([*(tensor for one in items for tensor in state_of(one)), sums, main])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_those_of_float64(dtype):
    tensors = [numbers(size, dtype, seed=size) for size in SIZES]
    sums = cpu_kernels.sums_of_squares(tensors)
    assert sums.dtype == torch.float64
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors])
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
    assert cpu_kernels.sums_of_squares([]).shape == (0,)


def test_squares_of_the_largest_and_the_smallest_numbers_are_kept():
    for value in (3.4e38, 1e-40):
        x = torch.full((1000,), value)
        (sum_,) = cpu_kernels.sums_of_squares([x])
        torch.testing.assert_close(sum_, x.double().square().sum(), rtol=1e-12, atol=0)
        assert 0 < sum_ < math.inf


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_in_its_sum_alone(value, dtype):
    for place in (0, 100, 65535, 65536, 69_999):
        spoiled = numbers(70_000, dtype)
        spoiled[place] = value
        sums = cpu_kernels.sums_of_squares([numbers(50), spoiled, numbers(50)])
        assert sums.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.125, 0.3])
def test_a_gradient_times_its_factor_is_added_with_two_roundings(dtype, factor):
    for size in SIZES:
        before, gradient = numbers(size, seed=1), numbers(size, dtype, seed=2)
        main = before.clone()
        cpu_kernels.accumulate(main, gradient, factor)
        assert torch.equal(main, before + gradient.float() * torch.tensor(factor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_added_where_it_is_and_nowhere_else(dtype, value):
    gradient = numbers(70_000, dtype)
    gradient[66_000] = value
    main = torch.zeros(70_000)
    cpu_kernels.accumulate(main, gradient, 1.0)
    assert (~main.isfinite()).nonzero().tolist() == [[66_000]]


def test_unsupported_tensors_are_recognised():
    matrix = torch.zeros(4, 6)
    assert cpu_kernels.supports(matrix)
    assert cpu_kernels.can_accumulate(matrix, matrix.bfloat16())
    assert not cpu_kernels.supports(matrix.t())
    assert not cpu_kernels.supports(matrix.double())
    assert not cpu_kernels.supports(torch.empty(4, device="meta"))
    assert not cpu_kernels.supports(torch.complex(matrix, matrix).conj().imag)
    assert not cpu_kernels.can_accumulate(matrix, matrix[:, :3])
    assert not cpu_kernels.can_accumulate(matrix.half(), matrix.half())
    freed = torch.zeros(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="has no memory"):
        cpu_kernels.sums_of_squares([freed])


FAULTS = [
    ("to[j] + from[j] * factor", "to[j] - from[j] * factor", "adding up fp32"),
    ("sum + wide * wide", "sum - wide * wide", "sums of squares"),
    ("g[j] = from[j] / unscale", "g[j] = from[j] * unscale", "Adam on fp32"),
    ("p[j] * f.shrink", "p[j]", "Adam on fp32"),
    ("v[j] = square;", "v[j] = mean;", "Adam on fp32"),
    ("if (clears &&", "if (!clears &&", "Adam on fp32"),
]


@pytest.mark.parametrize(
    ("right", "wrong", "noticed"),
    [FAULTS[0], *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:])],
)
def test_a_library_that_computes_wrongly_is_not_used(right, wrong, noticed, monkeypatch, tmp_path, caplog):
    text = cpu_kernels.SOURCE.read_text()
    assert right in text
    (tmp_path / "cpu.c").write_text(text.replace(right, wrong))
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernels.LIBRARY, "source", tmp_path / "cpu.c")
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", (("-O1", "-fopenmp"),))  # quick to build
    with caplog.at_level(logging.WARNING):
        library, reason = cpu_kernels.LIBRARY.load()
    assert library is None
    assert f"fails its self-check ({noticed}" in reason
    assert reason in caplog.text


@pytest.mark.parametrize(
    "flags", [("-march=x86-64",), pytest.param(("-march=haswell", "-fopenmp"), marks=pytest.mark.slow)]
)
def test_older_machines_get_the_same_bits(flags, monkeypatch, tmp_path):
    if torch.backends.cpu.get_cpu_capability() not in cpu_kernels.FUSED:
        pytest.skip("this machine has no AVX2")
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", (flags,))
    library, reason = cpu_kernels.LIBRARY.load()
    assert reason is None
    for half in (torch.float16, torch.bfloat16):
        here, there = item(1003, half, half), item(1003, half, half)
        cpu_kernels.adam_step([here], torch.tensor(3.0), torch.tensor(0.0))
        cpu_kernels.adam_step([there], torch.tensor(3.0), torch.tensor(0.0), library=library)
        assert same_bits(state_of(here), state_of(there))
