import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.statistics.amax import GradientWatch, sampled_positions


def small_model(seed=0, dtype=torch.float16):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    return model.to(dtype)


def backward(model, seed, scale=1.0):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    (model(torch.randn(4, 6, dtype=dtype)).float().square().sum() * scale).backward()


def test_the_maximum_of_all_micro_batches_survives_a_buffer_that_takes_the_gradients():
    model, reference = small_model(), small_model()
    watch = GradientWatch(model.named_parameters())
    GradBuffer(model.parameters())
    expected = 0.0
    for micro_batch in range(3):
        backward(model, micro_batch, scale=8.0)
        reference.zero_grad()
        backward(reference, micro_batch, scale=8.0)
        expected = max(expected, *(p.grad.abs().max().item() for p in reference.parameters()))
    assert model[0].weight.grad.dtype == torch.float32  # the sums
    assert watch.take().tolist() == [expected]
    assert watch.take().tolist() == [0.0]  # forgotten


def test_groups_are_kept_apart():
    model = small_model(dtype=torch.float32)
    ids = {id(p): index for index, p in enumerate(model.parameters())}
    watch = GradientWatch(model.named_parameters(), group_of=lambda p: ids[id(p)], num_groups=4)
    backward(model, 1)
    expected = [p.grad.abs().max().item() for p in model.parameters()]
    assert watch.take().tolist() == expected


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_becomes_inf_and_hides_no_other_group(value):
    model = small_model()
    watch = GradientWatch(model.named_parameters(), group_of=lambda p: int(p is model[2].bias), num_groups=2)
    hook = model[2].bias.register_hook(lambda gradient: torch.full_like(gradient, value))
    backward(model, 1)
    hook.remove()
    backward(model, 2)  # a clean micro-batch does not wipe it away
    others, bad = watch.take().tolist()
    assert bad == math.inf
    assert 0 < others < math.inf


def test_a_sample_looks_at_each_group_and_at_fewer_parameters():
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20))
    groups = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
    sampled = GradientWatch(
        layers.named_parameters(), sample=0.1, group_of=lambda p: groups[id(p)], num_groups=20
    )
    assert {name.split(".")[0] for name in sampled.names} == {str(index) for index in range(20)}
    assert len(sampled.names) < 25
    assert 2 <= len(GradientWatch(layers.named_parameters(), sample=0.1).names) <= 6


@given(st.integers(1, 400), st.floats(0.001, 1.0))
def test_sampled_positions_are_the_share_asked_for_and_never_none(count, sample):
    positions = sampled_positions(count, sample)
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert positions[-1] < count
    # points of the golden ratio deviate from a uniform share by O(log n)
    assert abs(len(positions) - sample * count) <= 2 + 2 * math.log2(count + 1)
    if sample == 1.0:
        assert positions == list(range(count))


def test_a_sample_meets_every_role_of_blocks_of_twelve():
    assert {position % 12 for position in sampled_positions(12 * 24, 0.25)} == set(range(12))


def test_frozen_empty_and_tied_parameters_do_no_harm():
    model = small_model(dtype=torch.float32)
    model[0].weight.requires_grad_(False)
    empty = torch.nn.Parameter(torch.zeros(0))
    named = [*model.named_parameters(), ("empty", empty), ("again", model[2].weight)]
    watch = GradientWatch(named)
    assert sorted(watch.names) == ["0.bias", "2.bias", "again"]
    backward(model, 1)
    empty.sum().backward()
    trained = (model[0].bias, model[2].weight, model[2].bias)
    assert watch.take().item() == max(p.grad.abs().max().item() for p in trained)


def test_detached_hooks_see_nothing():
    model = small_model()
    watch = GradientWatch(model.named_parameters())
    watch.detach()
    backward(model, 1)
    assert watch.take().tolist() == [0.0]


@pytest.mark.parametrize("sample", [0, -1, 1.5, math.nan])
def test_a_sample_out_of_range_is_refused(sample):
    with pytest.raises(UserError, match="sample = "):
        GradientWatch(small_model().named_parameters(), sample=sample)


@pytest.mark.parametrize("named", ["nothing", "frozen", "empty"])
def test_where_nothing_is_trained_a_watch_sees_nothing(named):
    parameters = {
        "nothing": [],
        "frozen": list(small_model().requires_grad_(False).named_parameters()),
        "empty": [("a", torch.nn.Parameter(torch.zeros(0, 3)))],
    }[named]
    watch = GradientWatch(parameters, sample=0.5, group_of=lambda _: 2, num_groups=3)
    assert watch.names == []
    for _ in range(2):
        taken = watch.take()
        assert taken.tolist() == [0.0, 0.0, 0.0]
        assert (taken.dtype, taken.device.type) == (torch.float32, "cpu")
    watch.detach()


def test_a_sample_is_checked_also_where_nothing_is_trained():
    with pytest.raises(UserError, match="sample"):
        GradientWatch([], sample=0)


def test_sparse_gradients_are_watched_with_what_they_add_up_to():
    table = torch.nn.Embedding(5, 2, sparse=True)
    watch = GradientWatch(table.named_parameters())
    (table(torch.tensor([1, 1, 3])) * torch.tensor([[2.0], [3.0], [-4.0]])).sum().backward()
    assert watch.take().tolist() == [5.0]
