import pytest
import torch

from megalowbit.layers.parameter_split.masters import (
    MOMENT_RULES,
    largest_singular_value,
    split_masters,
    without_rule,
)

OUT, IN, RANK = 6, 5, 2
SHAPES = ((OUT, IN), (OUT, RANK), (RANK,), (RANK, IN))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def masters():
    return tuple(randn(*shape, seed=index) for index, shape in enumerate(SHAPES))


@pytest.fixture
def states():
    weight = {"step": torch.tensor(7.0), "exp_avg": randn(OUT, IN, seed=8), "beta": 0.5, "nothing": None}
    weight["exp_avg_sq"] = randn(OUT, IN, seed=9).square()
    return [weight, {"exp_avg": torch.ones(OUT, RANK), "old": 1}, {}, {}]


def whole(masters):
    w, u, s, v = (master.double() for master in masters)
    return w + u @ torch.diag(s) @ v


@pytest.mark.parametrize("is_split", [False, True])
def test_the_full_weight_is_split_in_place(masters, states, is_split):
    expected = whole(masters) if is_split else masters[0].double()
    split_masters(masters, states, is_split=is_split, is_projected=True, is_computed=True)
    torch.testing.assert_close(whole(masters), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(masters[2].double(), torch.linalg.svdvals(expected)[:RANK], rtol=1e-5, atol=0)


def test_moments_are_projected_counts_copied_and_stale_entries_removed(masters, states):
    m, variance = states[0]["exp_avg"].double(), states[0]["exp_avg_sq"].double()
    split_masters(masters, states, is_split=False, is_projected=True, is_computed=True)
    u, s, v = (master.double() for master in masters[1:])
    torch.testing.assert_close(states[1]["exp_avg"].double(), m @ v.t() @ torch.diag(s), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        states[2]["exp_avg"].double(), torch.diag(u.t() @ m @ v.t()), rtol=1e-5, atol=1e-6
    )
    expected = torch.diag(s).square() @ u.t().square() @ variance
    torch.testing.assert_close(states[3]["exp_avg_sq"].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(states[0]["exp_avg"].double(), m)
    for state in states:
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "beta", "nothing"}
        assert (state["step"], state["beta"], state["nothing"]) == (torch.tensor(7.0), 0.5, None)
    assert len({id(state["step"]) for state in states}) == 4


def test_reset_drops_all_state(masters, states):
    tensors = split_masters(masters, states, is_split=False, is_projected=False, is_computed=True)
    assert states == [{}, {}, {}, {}]
    assert len(tensors) == 4


def test_a_rank_that_does_not_compute_gets_empty_tensors_in_the_same_order(masters, states):
    before = [master.clone() for master in masters]
    room = split_masters(masters, states, is_split=False, is_projected=True, is_computed=False)
    assert all(torch.equal(a, b) for a, b in zip(masters, before, strict=True))
    shapes = [(tensor.shape, tensor.dtype) for tensor in room]
    done = split_masters(masters, states, is_split=False, is_projected=True, is_computed=True)
    assert shapes == [(tensor.shape, tensor.dtype) for tensor in done]
    assert [tuple(shape) for shape, _ in shapes] == [*SHAPES, *SHAPES[1:], *SHAPES[1:]]


def test_moments_keep_their_dtype(masters, states):
    states[0]["exp_avg"] = states[0]["exp_avg"].bfloat16()
    split_masters(masters, states, is_split=False, is_projected=True, is_computed=True)
    assert states[3]["exp_avg"].dtype == torch.bfloat16
    assert states[3]["exp_avg_sq"].dtype == torch.float32


def test_only_state_with_an_entry_per_element_needs_a_rule(states):
    assert without_rule(states[0]) is None
    assert without_rule({**states[0], "exp_inf": torch.zeros(OUT, IN)}) == "exp_inf"
    assert without_rule({"mu_product": torch.tensor(1.0)}) is None
    assert set(MOMENT_RULES) == {"exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq"}


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_the_largest_singular_value_is_exact_near_the_limit_and_never_too_small(masters, is_split, scale):
    masters = tuple(scale * part if index in (0, 2) else part for index, part in enumerate(masters))
    expected = whole(masters) if is_split else masters[0].double()
    found = largest_singular_value(masters, is_split=is_split)
    exact, frobenius = torch.linalg.svdvals(expected)[0].item(), expected.square().sum().sqrt().item()
    assert found == pytest.approx(exact if scale > 1 else frobenius, rel=1e-6)
    assert found >= exact * (1 - 1e-6)
