import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.grad_buffer import GradBuffer


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
        assert p.grad is None
        assert p.main_grad.dtype == torch.float32
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


def test_zero_forgets_everything():
    model = model_of()
    buffer = GradBuffer(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    assert buffer.flat.any()
    buffer.zero()
    assert not buffer.flat.any()
    assert all(p.grad is None for p in model.parameters())


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


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    GradBuffer(embedding.parameters())
    with pytest.raises(UserError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
