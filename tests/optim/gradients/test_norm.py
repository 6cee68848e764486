import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inspected_gradients import inspected

from megalowbit.optim.gradients.norm import (
    Measurement,
    clip_coefficient,
    gradient_divisor,
    is_counted_once,
    measure_gradients,
)
from megalowbit.optim.kernels import cpu as cpu_kernels

BAD = [math.inf, -math.inf, math.nan]


def reference_norm(tensors):
    return math.sqrt(math.fsum(v * v for t in tensors for v in t.double().flatten().tolist()))


by_parameter = partial(inspected, kind="sum_of_norms")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_norm_equals_float64_reference(sizes):
    tensors = [torch.randn(size) * 10 ** torch.randint(-3, 4, ()).item() for size in sizes]
    facts = inspected(tensors)
    assert not facts.found_inf
    assert facts.norm == pytest.approx(reference_norm(tensors), rel=1e-5)


def test_norm_of_millions_of_elements_keeps_six_digits():
    gradient = torch.randn(4_000_003) + 0.3
    exact = float(gradient.double().square().sum().sqrt())
    assert inspected([gradient]).norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 70_000, 199_999])
def test_one_bad_element_anywhere_is_found(bad, place):
    gradient = torch.ones(200_000)
    gradient[place] = bad
    assert inspected([torch.ones(3), gradient]).found_inf


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_element_in_an_uncounted_gradient_is_found_but_not_measured(bad):
    counts = {"is_counted": [True, False]}
    facts = inspected([torch.tensor([3.0, 4.0]), torch.tensor([1e3])], **counts)
    assert (facts.found_inf, facts.norm) == (False, 5.0)
    assert inspected([torch.ones(2), torch.tensor([bad])], **counts).found_inf


def test_huge_finite_gradients_are_not_taken_for_infinite():
    facts = inspected([torch.tensor([3e30, 4e30]), torch.ones(2)])
    assert not facts.found_inf
    assert facts.norm == pytest.approx(5e30, rel=1e-6)


def test_huge_and_infinite_together_are_infinite():
    assert inspected([torch.tensor([3e30, math.inf])]).found_inf


def test_zeros_are_counted_exactly():
    tensors = [torch.tensor([0.0, 1.0, -0.0]), torch.zeros(2, 3)]
    assert inspected(tensors, count_zeros=True).num_zeros == 8
    assert inspected([torch.tensor([3e30, 0.0])], count_zeros=True).num_zeros == 1
    assert inspected(tensors).num_zeros is None


def test_a_step_without_gradients_has_norm_zero():
    facts = inspected([], count_zeros=True)
    assert (facts.found_inf, facts.norm, facts.num_zeros) == (False, 0.0, 0)
    assert inspected([torch.empty(0)]).norm == 0


@given(st.floats(0.01, 1e4), st.floats(0, 1e8))
def test_clipped_norm_is_at_most_the_limit_and_small_ones_stay(max_norm, norm):
    coefficient = clip_coefficient(max_norm, torch.tensor(norm, dtype=torch.float64)).item()
    assert norm * coefficient <= max_norm * (1 + 1e-9)
    assert coefficient <= 1
    if norm < max_norm - 1e-5:
        assert coefficient == 1


@pytest.mark.parametrize(
    ("clip_grad", "norm", "expected"), [(0.0, 64.0, 8.0), (2.0, 64.0, 32.0), (9.0, 64.0, 8.0)]
)
def test_scaled_gradients_are_divided_by_the_scale_and_what_clips_them(clip_grad, norm, expected):
    divisor = gradient_divisor(torch.tensor(norm, dtype=torch.float64), 8.0, clip_grad)
    assert divisor.dtype == torch.float32
    assert float(divisor) == pytest.approx(expected, rel=1e-6)


def test_nothing_is_divided_without_scale_and_clipping_and_never_by_infinity():
    norm = torch.tensor(1e300, dtype=torch.float64)
    assert gradient_divisor(norm, 1.0, 0.0) is None
    assert float(gradient_divisor(norm, 1.0, 1e-300)) == torch.finfo(torch.float32).max


def test_extra_figures_are_read_together_with_the_measurement():
    norm, flag = torch.tensor([3.0, 0.0], dtype=torch.float64)
    figures = [[torch.tensor([1.0, 2.0])], [], [torch.tensor([4.0]), torch.tensor([5.0])]]
    facts, numbers = Measurement(norm=norm, flag=flag).read(figures)
    assert (facts.found_inf, facts.norm, facts.num_zeros) == (False, 3.0, None)
    assert numbers == [[1.0, 2.0], [], [4.0, 5.0]]


def test_shared_parameters_are_not_counted():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert is_counted_once(parameter)
    parameter.shared = True
    assert not is_counted_once(parameter)


def reference_sum_of_norms(tensors):
    return math.fsum(reference_norm([tensor]) for tensor in tensors)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_sum_of_norms_equals_a_float64_reference(sizes):
    tensors = [torch.randn(size, 2) * 10 ** torch.randint(-3, 4, ()).item() for size in sizes]
    facts = by_parameter(tensors)
    assert not facts.found_inf
    assert facts.norm == pytest.approx(reference_sum_of_norms(tensors), rel=1e-6)


def test_the_sum_of_norms_of_large_parameters_keeps_six_digits():
    torch.manual_seed(0)
    tensors = [torch.randn(700, 300) + 0.3, torch.randn(5), torch.randn(65_537)]
    facts = by_parameter(tensors)
    assert facts.norm == pytest.approx(sum(float(t.double().norm()) for t in tensors), rel=1e-6)


def test_the_sum_of_norms_leaves_out_what_is_not_counted_and_what_is_not_there():
    gradients = [torch.tensor([3.0, 4.0]), None, torch.tensor([1e3, 0.0]), torch.tensor([0.0, 2.0])]
    facts = by_parameter(gradients, is_counted=[True, True, False, True], count_zeros=True)
    assert (facts.found_inf, facts.norm, facts.num_zeros) == (False, 7.0, 1)
    assert by_parameter([], is_counted=[]).norm == 0
    assert by_parameter([None], is_counted=[True]).norm == 0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("place", [0, 70_000])
def test_one_bad_element_is_found_where_norms_are_summed(bad, is_counted, place):
    gradient = torch.ones(100_000)
    gradient[place] = bad
    assert by_parameter([torch.ones(3), gradient], is_counted=[True, is_counted]).found_inf


def test_huge_finite_gradients_have_a_finite_sum_of_norms():
    facts = by_parameter([torch.tensor([3e30, 4e30]), torch.tensor([1e31])])
    assert not facts.found_inf
    assert facts.norm == pytest.approx(1.5e31, rel=1e-6)


@pytest.fixture(params=["kernel", "torch"])
def summing(request, monkeypatch):
    """Squares are summed by the CPU kernel, then by torch."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    elif not cpu_kernels.is_available():
        pytest.skip(cpu_kernels.why_unavailable())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_exact", [False, True])
def test_half_precision_gradients_are_measured_as_their_exact_values(summing, dtype, is_exact):
    torch.manual_seed(0)
    # fp16's largest values, whose squares it cannot hold, and its smallest
    values = [torch.randn(70_000), torch.tensor([6e4, -6e4, 6e-8]), torch.empty(0)]
    tensors = [value.to(dtype) for value in values]
    exact = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
    facts, _ = measure_gradients(tensors, count_zeros=True, is_exact=is_exact).read()
    assert facts.norm == pytest.approx(exact, rel=1e-6)
    assert (facts.found_inf, facts.num_zeros) == (False, sum(int((t == 0).sum()) for t in tensors))
    facts, _ = measure_gradients(tensors, kind="sum_of_norms", is_exact=is_exact).read()
    assert facts.norm == pytest.approx(sum(float(t.double().norm()) for t in tensors), rel=1e-6)
    assert (facts.found_inf, facts.num_zeros) == (False, None)


@pytest.mark.parametrize("kind", ["global", "sum_of_norms"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_exactly_measured_huge_gradients_are_finite(summing, size, kind):
    gradient = torch.zeros(size)
    gradient[[1, -1]] = torch.tensor([3e30, -4e30])
    facts, _ = measure_gradients([gradient], kind=kind, is_exact=True).read()
    assert (facts.norm, facts.found_inf) == (pytest.approx(5e30, rel=1e-6), False)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("is_exact", [False, True])
def test_a_bad_gradient_sets_the_flag_beside_huge_ones_and_in_half_precision(summing, bad, is_exact):
    for tensors in ([torch.tensor([3e30]), torch.tensor([1.0, bad])], [torch.tensor([bad]).half()]):
        for kind in ("global", "sum_of_norms"):
            assert measure_gradients(tensors, kind=kind, is_exact=is_exact).flag > 0


def test_measurements_stay_on_the_device(summing):
    for measured in (
        measure_gradients([torch.ones(4)]),
        measure_gradients([torch.tensor([math.nan])]),
        measure_gradients([torch.ones(4), None], kind="sum_of_norms"),
        measure_gradients([]),
    ):
        numbers = torch.stack([measured.norm, measured.flag])
        assert (numbers.shape, numbers.dtype) == ((2,), torch.float64)
        assert torch.isfinite(numbers).all()  # so that it may travel in a sum


def test_an_experts_gradient_is_counted_by_every_rank_and_a_replica_by_the_first(monkeypatch):
    monkeypatch.setattr("megalowbit.distributed.process_group.rank", lambda group=None: 1)
    group = object()
    replica, shard, expert = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    shard.tensor_model_parallel = True
    expert.allreduce = False
    assert [is_counted_once(p, group) for p in (replica, shard, expert)] == [False, True, True]
    shard.shared = expert.shared = True
    assert [is_counted_once(p, group) for p in (shard, expert)] == [False, False]
