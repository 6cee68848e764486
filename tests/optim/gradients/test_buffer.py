import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.kernels import cpu as cpu_kernels


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False))


@given(st.integers(1, 5), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_micro_batches_add_up_in_fp32(micro_batches, seed):
    half = model_of(seed).to(torch.bfloat16)
    twin = copy.deepcopy(half)  # keeps ordinary gradients, which are summed in float64 one by one
    GradBuffer(half.parameters())
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for _ in range(micro_batches):
        x = torch.randn(4, 6, dtype=torch.bfloat16)
        for model in (half, twin):
            model(x).float().square().sum().backward()
        for total, p in zip(expected, twin.parameters(), strict=True):
            total += p.grad.double()
            p.grad = None
    for total, p in zip(expected, half.parameters(), strict=True):
        assert p.main_grad.dtype == p.grad.dtype == torch.float32
        assert p.grad.data_ptr() == p.main_grad.data_ptr()  # nothing is kept in half precision
        torch.testing.assert_close(p.main_grad.double(), total, rtol=1e-6, atol=1e-6)


def test_views_lie_in_reverse_order_and_cover_the_buffer():
    model = model_of()
    buffer = GradBuffer(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.main_grad.fill_(index + 1)
    sizes = [p.numel() for p in model.parameters()]
    expected = [index + 1 for index in reversed(range(3)) for _ in range(sizes[index])]
    assert buffer.flat.tolist() == expected
    assert buffer.flat.is_contiguous()


def test_a_tied_parameter_has_one_view_with_both_gradients():
    layer = torch.nn.Linear(3, 3, bias=False)
    buffer = GradBuffer([layer.weight, layer.weight])
    layer(layer(torch.eye(3))).sum().backward()
    weight = layer.weight.detach().double().requires_grad_()
    (torch.eye(3, dtype=torch.float64) @ weight.T @ weight.T).sum().backward()
    assert buffer.flat.numel() == 9
    torch.testing.assert_close(layer.weight.main_grad.double(), weight.grad, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_stays_zero():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    GradBuffer([used, unused])
    used.sum().backward()
    assert used.main_grad.tolist() == [1, 1]
    assert unused.main_grad.tolist() == [0, 0, 0]


def test_zero_clears_the_buffer_and_pending_gradients():
    model = model_of()
    buffer = GradBuffer(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    assert buffer.flat.any()
    buffer.zero()
    assert not buffer.flat.any()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("is_all", [True, False])
def test_zero_also_clears_a_tensor_that_others_put_in_place_of_a_view(is_all):
    model = model_of()
    buffer = GradBuffer(model.parameters())
    buffer.flat.fill_(1.0)
    model[0].weight.main_grad = torch.full((5, 6), 2.0)
    model[0].bias.main_grad.data = torch.full((5,), 3.0)
    buffer.zero(None if is_all else model[0].parameters())
    assert not model[0].weight.main_grad.any()
    assert not model[0].bias.main_grad.any()
    assert model[2].weight.main_grad.any() == (not is_all)


def test_no_parameters_make_an_empty_buffer():
    assert GradBuffer([]).flat.numel() == 0


def test_detached_parameters_have_ordinary_gradients_again():
    model = model_of()
    GradBuffer(model.parameters()).detach()
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None and not hasattr(p, "main_grad") for p in model.parameters())


def test_several_devices_are_refused():
    with pytest.raises(UserError, match="several devices"):
        GradBuffer([torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1, device="meta"))])


def test_a_graph_of_gradients_is_refused():
    """`.grad` is the sum, which has no graph: a penalty on it would be a constant."""
    linear = torch.nn.Linear(4, 2)
    GradBuffer(linear.parameters())
    with pytest.raises(UserError, match=r"create_graph=True.*torch\.autograd\.grad"):
        linear(torch.ones(3, 4)).square().sum().backward(create_graph=True)
    for parameter in linear.parameters():
        parameter.grad = None  # a gradient with a graph is a reference cycle


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    GradBuffer(embedding.parameters())
    with pytest.raises(UserError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()


@pytest.fixture(params=["kernel", "torch"])
def adding(request, monkeypatch):
    """Gradients are added up by the CPU kernel, then by torch."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    elif not cpu_kernels.is_available():
        pytest.skip(cpu_kernels.why_unavailable())
    return request.param


def pair_of(**options):
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    return one, two, GradBuffer([one, two], **options)


def backward(parameter, value):
    (parameter * value).sum().backward()


def test_a_bad_gradient_that_was_cleared_never_comes_back(adding):
    one, two, buffer = pair_of()
    backward(one, math.inf)
    backward(two, math.nan)
    buffer.zero()
    assert buffer.flat.tolist() == [0.0] * 5
    backward(one, 1.0)
    assert buffer.flat.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert buffer.overflowed(is_before=False) == []


@pytest.mark.parametrize("is_detached", [False, True])
def test_values_written_to_a_main_grad_are_kept_and_added_to(adding, is_detached):
    one, two, _ = pair_of()
    written = one.main_grad.data if is_detached else one.main_grad
    written.copy_(torch.tensor([10.0, 20.0]))
    backward(one, 1.0)
    assert one.main_grad.tolist() == [11.0, 21.0]
    assert two.main_grad.tolist() == [0.0, 0.0, 0.0]


def test_zeroing_some_leaves_the_others(adding):
    one, two, buffer = pair_of()
    backward(one, 3.0)
    backward(two, 2.0)
    buffer.zero([one])
    assert one.main_grad.tolist() == [0.0, 0.0]
    assert two.main_grad.tolist() == [2.0, 2.0, 2.0]


def test_hooks_that_change_a_gradient_before_it_is_added_are_seen(adding):
    one, _, _ = pair_of()
    one.register_hook(lambda gradient: gradient * 10)
    backward(one, 3.0)
    assert one.main_grad.tolist() == [30.0, 30.0]


def test_a_gradient_of_another_layout_is_added_in_its_place(adding):
    weight = torch.nn.Parameter(torch.zeros(2, 3).half())
    GradBuffer([weight])
    values = torch.arange(6.0).half().view(3, 2)
    for _ in range(2):
        (weight * values.t()).sum().backward()
    assert weight.main_grad.tolist() == (2 * values.t()).tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_reduced", [True, False])
def test_overflowed_parameters_are_listed_in_the_order_of_backward(adding, bad, is_reduced):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    buffer = GradBuffer(parameters)
    for index, value in ((2, bad), (0, 1.0), (3, bad)):
        backward(parameters[index], value)
    if is_reduced:
        assert buffer.before_reduction() is buffer.flat
        buffer.flat.fill_(math.nan)  # what averaging with another rank may do
        everything = [(place, parameters[index]) for place, index in enumerate((2, 0, 3, 1))]
        assert buffer.overflowed(is_before=False) == everything
    assert buffer.is_reduced == is_reduced
    assert buffer.overflowed(is_before=True) == [(0, parameters[2]), (2, parameters[3])]
    buffer.zero()
    assert not buffer.is_reduced
    assert buffer.overflowed(is_before=True) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_factors_are_divided_out_of_each_gradient_as_they_are_at_its_time(adding, dtype):
    one, two = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    factors = {id(one): 4.0, id(two): 1.0}
    GradBuffer([one, two], factor_of=lambda p: factors[id(p)])
    backward(one, 8.0)
    factors[id(one)] = 2.0
    backward(one, 8.0)
    backward(two, 8.0)
    assert one.main_grad.tolist() == [6.0, 6.0]
    assert two.main_grad.tolist() == [8.0, 8.0]


def test_gradients_not_yet_added_are_dropped(adding):
    one, _, buffer = pair_of()
    one.grad = torch.ones(2)
    buffer.zero()
    assert one.grad is None
    assert not buffer.flat.any()


def test_another_buffer_takes_parameters_over(adding):
    one, two, former = pair_of()
    backward(one, 5.0)
    later = GradBuffer([one])
    assert one.grad_buffer is later
    assert two.grad_buffer is former
    assert former.parameters == [two]
    backward(one, 3.0)
    backward(two, 1.0)
    assert one.main_grad.tolist() == [3.0, 3.0]  # once, and nothing of what was before
    assert later.flat.tolist() == [3.0, 3.0]
    assert former.flat.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_gradient_that_is_still_held_outlives_the_buffer(adding):
    one, two, buffer = pair_of()
    backward(one, 5.0)
    backward(two, 7.0)
    held = one.grad, two.grad
    GradBuffer([one])  # takes it over
    buffer.detach()
    assert [each.tolist() for each in held] == [[5.0, 5.0], [7.0, 7.0, 7.0]]
    assert not buffer.flat.any()


def test_a_buffer_without_parameters_goes_through_all_of_a_step(adding):
    buffer = GradBuffer([])
    assert buffer.before_reduction().numel() == 0
    assert buffer.overflowed(is_before=True) == []
    buffer.zero()
    buffer.detach()


def test_a_frozen_parameter_has_a_gradient_after_a_reduction_only_if_some_rank_has_one(adding):
    mine, others, nobodys, _ = parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    buffer = GradBuffer(parameters)
    backward(mine, 1.0)
    for each in (mine, others, nobodys):
        each.requires_grad_(False)
    buffer.before_reduction()
    others.main_grad.fill_(2.0)  # the gradient of another rank
    buffer.collect()
    assert [each.grad is None for each in parameters] == [False, False, True, False]
    assert buffer.is_reduced
    buffer.zero()
    buffer.before_reduction()  # from here on it is known which parameters are frozen
    assert [each.grad is None for each in parameters] == [True, True, True, False]
    buffer.zero()
    others.requires_grad_(True)
    buffer.before_reduction()
    assert [each.grad is None for each in parameters] == [True, False, True, False]
