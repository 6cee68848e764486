import copy
import itertools
import pickle

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.random_stream import RandomStream, check_samples, fill_uniform


def draw(stream: RandomStream, *args, n: int = 64, **kwargs) -> torch.Tensor:
    return fill_uniform(torch.empty(n), stream.generator(*args, "cpu", **kwargs))


def test_equal_keys_draw_equal_numbers_and_any_other_key_different_ones():
    def numbers(seed=1, rank=0, layer="a", role="input", step=0):
        return draw(RandomStream(seed, rank), layer, role, step=step)

    base = numbers()
    assert torch.equal(base, numbers())
    others = [numbers(seed=2), numbers(rank=1), numbers(layer="b"), numbers(role="weight"), numbers(step=1)]
    for one, other in itertools.combinations([base, *others], 2):
        assert not torch.equal(one, other)


def test_keys_do_not_run_into_each_other():
    stream = RandomStream(0)
    assert not torch.equal(draw(stream, "a1", "2", step=3), draw(stream, "a", "12", step=3))


def test_shared_tensors_draw_alike_on_all_ranks():
    one, other = RandomStream(7, rank=0), RandomStream(7, rank=5)
    assert torch.equal(draw(one, "a", "weight", is_shared=True), draw(other, "a", "weight", is_shared=True))


def test_step_advances_and_a_captured_step_can_be_replayed():
    stream = RandomStream(3)
    before = draw(stream, "a", "input")
    stream.advance()
    assert stream.step == 1
    assert not torch.equal(draw(stream, "a", "input"), before)
    assert torch.equal(draw(stream, "a", "input", step=0), before)


def test_a_resumed_stream_draws_what_the_first_would_have():
    first = RandomStream(3, rank=1)
    for _ in range(5):
        first.advance()
    resumed = RandomStream(99, rank=1)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(draw(first, "a", "input"), draw(resumed, "a", "input"))
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(draw(first, "a", "input"), draw(copied, "a", "input"))


@pytest.mark.parametrize("state", [{}, {"seed": 1}, {"seed": 1, "step": -1}, {"seed": 1, "step": "2"}])
def test_a_damaged_state_is_refused(state):
    with pytest.raises(UserError, match="random stream state"):
        RandomStream(0).load_state_dict(state)


def test_drawing_leaves_torchs_default_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    draw(RandomStream(0), "a", "input")
    assert torch.equal(torch.get_rng_state(), state)


def test_uniform_numbers_fill_the_unit_interval_with_23_bits():
    numbers = fill_uniform(torch.empty(1 << 20), torch.Generator().manual_seed(0)).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 5 / (12**0.5 * 2**10)
    assert abs(numbers.square().mean().item() - 1 / 3) < 1e-3
    counts = torch.histc(numbers.float(), bins=64, min=0, max=1)
    expected = 2**20 / 64
    assert ((counts - expected) ** 2 / expected).sum().item() < 125  # chi-square, 63 degrees, p ≈ 5e-6
    scaled = numbers * 2**23
    assert torch.equal(scaled, scaled.round())
    assert (scaled.long() & 1).double().mean().item() == pytest.approx(0.5, abs=0.003)


def test_neighbouring_numbers_are_uncorrelated():
    numbers = fill_uniform(torch.empty(1 << 18), torch.Generator().manual_seed(1)).double() - 0.5
    for lag in (1, 2):
        correlation = (numbers[lag:] * numbers[:-lag]).mean() * 12
        assert abs(correlation.item()) < 5 / 2**9


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (torch.zeros(256), "constant 0.0"),
        (torch.full((256,), 0.5), "constant 0.5"),
        (torch.linspace(0, 1.5, 256), "outside"),
        (torch.linspace(0, 0.1, 256), "mean"),
        (torch.full((256,), float("nan")), "outside"),
    ],
)
def test_a_broken_generator_is_refused(sample, problem):
    with pytest.raises(RuntimeError, match=f"random generator of device cpu.*{problem}.*nosr"):
        check_samples(sample, torch.rand(256), torch.device("cpu"))


def test_a_generator_that_ignores_its_seed_is_refused():
    sample = torch.rand(256)
    with pytest.raises(RuntimeError, match="same numbers for two seeds"):
        check_samples(sample, sample.clone(), torch.device("cpu"))


def test_the_first_draw_of_a_stream_is_the_one_of_its_key_despite_the_check():
    checked, fresh = RandomStream(1), RandomStream(1)
    draw(checked, "other", "input")
    assert torch.equal(draw(checked, "a", "input"), draw(fresh, "a", "input"))
