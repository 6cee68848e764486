import copy
import hashlib
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
from forks import run_script

from megalowbit.errors import UserError
from megalowbit.quantize import backends
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream, check_rounding

CPU = torch.device("cpu")


def test_equal_addresses_have_equal_keys_and_any_other_address_another():
    def key(seed=1, rank=0, layer="a", role="input", step=0, use=0):
        return RandomStream(seed, rank).key(layer, role, step=step, use=use)

    assert key() == key()
    others = [
        key(seed=2), key(rank=1), key(layer="b"), key(role="weight"), key(step=1), key(use=1),
        key(layer="a1", role="2"), key(layer="a", role="12"),
    ]  # fmt: skip
    for one, other in itertools.combinations([key(), *others], 2):
        assert one != other


def test_a_key_is_the_published_hash_and_the_step_stands_beside_it():
    address = repr((5, "h.0.mlp", "grad_output", 1, 3)).encode()
    expected = int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little")
    stream = RandomStream(5, rank=3)
    for step in (0, 7, 1 << 40):
        assert stream.key("h.0.mlp", "grad_output", step=step, use=1) == (expected, step)


def test_different_addresses_round_differently_and_equal_ones_equally():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def codes(key):
        return quantizer("nvfp4e2m1b").quantize(x, random_key=key).codes

    stream = RandomStream(1)
    first = codes(stream.key("a", "input"))
    assert torch.equal(first, codes(RandomStream(1).key("a", "input")))
    for other in (
        stream.key("a", "input", step=1),
        stream.key("b", "input"),
        stream.key("a", "input", use=1),
    ):
        assert not torch.equal(first, codes(other))


def test_shared_tensors_have_the_same_key_on_all_ranks():
    one, other = RandomStream(7, rank=0), RandomStream(7, rank=5)
    assert one.key("a", "weight", is_shared=True) == other.key("a", "weight", is_shared=True)
    assert one.key("a", "input") != other.key("a", "input")


def test_a_changed_rank_or_seed_changes_keys_asked_for_before():
    stream = RandomStream(1)
    before = stream.key("a", "input")
    stream.rank = 2
    assert stream.key("a", "input") == RandomStream(1, rank=2).key("a", "input") != before


def test_without_a_rank_or_a_process_group_keys_are_those_of_rank_0():
    assert RandomStream(1).key("a", "input") == RandomStream(1, rank=0).key("a", "input")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies_leave_out_the_rank_that_was_not_given(duplicate):
    assert duplicate(RandomStream(1)).given_rank is None
    assert duplicate(RandomStream(1, rank=2)).given_rank == 2


def test_a_stream_without_a_rank_follows_the_process_group_as_it_comes_and_goes():
    # in a process of its own: another test may have left a group in this one
    result = run_script(Path(__file__).with_name("streams_of_groups.py"))
    assert result.stdout == "done\n", result.stderr


def test_evaluation_keeps_no_keys_without_end():
    stream = RandomStream(1)
    first = [stream.key("a", "input", use=use) for use in range(2000)]
    assert len(stream._keys) <= 8
    assert first == [stream.key("a", "input", use=use) for use in range(2000)]
    assert len(set(first)) == 2000


def test_step_advances_and_a_captured_step_can_be_replayed():
    stream = RandomStream(3)
    before = stream.key("a", "input")
    stream.advance()
    assert stream.step == 1
    assert stream.key("a", "input") != before
    assert stream.key("a", "input", step=0) == before


def test_a_resumed_or_copied_stream_continues_like_the_original():
    first = RandomStream(3, rank=1)
    for _ in range(5):
        first.advance()
    resumed = RandomStream(99, rank=1)
    resumed.load_state_dict(first.state_dict())
    assert first.state_dict() == {"seed": 3, "step": 5}
    for same in (resumed, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert same.key("a", "input") == first.key("a", "input")
        same.advance()
        assert (same.step, first.step) == (6, 5)


def test_the_step_tensor_is_the_step():
    stream = RandomStream(3)
    stream.advance()
    held = stream.step_tensor
    assert held.item() == 1
    stream.load_state_dict({"seed": 3, "step": 9})
    assert held.item() == stream.step == 9
    held += 1
    assert stream.step == 10


@pytest.mark.parametrize(
    "state",
    [
        {}, {"seed": 1}, {"seed": 1, "step": -1}, {"seed": 1, "step": "2"}, {"seed": 1, "step": 2**63},
        {"seed": True, "step": 1}, {"seed": 1, "step": False}, {"seed": 1.0, "step": 1}, None, [], 3,
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(state):
    with pytest.raises(UserError, match="random stream state"):
        RandomStream(0).load_state_dict(state)


def test_hadamard_signs_are_sixteen_bits_of_the_seed_alone():
    signs = [RandomStream(seed).hadamard_signs() for seed in range(200)]
    assert all(0 <= each < 1 << 16 for each in signs)
    assert len(set(signs)) > 190
    assert RandomStream(3, rank=4).hadamard_signs() == signs[3]
    mean_bits = sum(each.bit_count() for each in signs) / 200
    assert abs(mean_bits - 8) < 0.8  # four standard deviations


def test_asking_for_keys_leaves_torchs_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    stream = RandomStream(0)
    stream.key("a", "input")
    stream.check(CPU)
    assert torch.equal(torch.get_rng_state(), state)


def with_key(change):
    """A backend that rounds with another key than it was given."""

    def encode(request):
        return backends.encode(request._replace(random_key=change(request.random_key)))

    return encode


def nearest(request):
    return quantizer("nvfp4e2m1bnosr").quantize(request.x)


def always_up(request):
    return backends.encode(request._replace(x=torch.where(request.x < 6, request.x + 0.06, request.x)))


def wrong_codes(request):
    encoded = backends.encode(request)
    return encoded._replace(codes=encoded.codes ^ 0x22)


@pytest.mark.parametrize(
    ("encode", "problem"),
    [
        (nearest, "draws a constant"),
        (always_up, "is biased"),
        (wrong_codes, "not their neighbours"),
        (with_key(lambda key: key._replace(key=5)), "same numbers for another key"),
        (with_key(lambda key: key._replace(key=key.key & 0xFFFFFFFF)), "same numbers for another key"),
        (with_key(lambda key: key._replace(step=0)), "same numbers for another step"),
        (with_key(lambda key: key._replace(step=key.step & 0xFFFFFFFF)), "same numbers for another step"),
    ],
)
def test_a_device_that_would_round_with_a_bias_is_refused(encode, problem):
    stream = RandomStream(1)
    with pytest.raises(RuntimeError, match=f"stochastic rounding on device cpu .*{problem}.*nosr"):
        stream.check(CPU, encode)
    with pytest.raises(RuntimeError, match=problem):
        check_rounding(CPU, encode)


def test_a_device_is_checked_once_and_changes_no_key():
    calls = []

    def counting(request):
        calls.append(request.random_key)
        return backends.encode(request)

    stream = RandomStream(1)
    before = stream.key("a", "input")
    stream.check(CPU, counting)
    first = len(calls)
    stream.check(CPU, counting)
    assert first == len(calls) > 2
    assert stream.key("a", "input") == before


@pytest.mark.parametrize("value", [1.7, 1.0, "x", [0], True])
def test_seed_and_rank_are_whole_numbers(value):
    with pytest.raises(UserError, match=f"random stream seed = {re.escape(repr(value))}: expected a whole"):
        RandomStream(value)
    with pytest.raises(UserError, match=f"random stream rank = {re.escape(repr(value))}: expected a whole"):
        RandomStream(0, value)


def test_a_seed_is_not_left_out():
    with pytest.raises(UserError, match="random stream seed = None"):
        RandomStream(None)


def test_a_rank_is_not_negative_and_a_seed_is_any_integer():
    with pytest.raises(UserError, match="rank = -1"):
        RandomStream(0, -1)
    seeds = (-1, 0, 2**64, 10**30)
    assert len({RandomStream(seed).key("a", "input") for seed in seeds}) == 4


def test_the_last_step_can_be_loaded_and_not_passed():
    stream = RandomStream(0)
    stream.load_state_dict({"seed": -5, "step": 2**63 - 2})
    stream.advance()
    assert stream.state_dict() == {"seed": -5, "step": 2**63 - 1}
    with pytest.raises(UserError, match="at step 9223372036854775807, the last there is"):
        stream.advance()
    assert stream.step == 2**63 - 1


def test_a_stream_made_in_inference_mode_has_an_ordinary_step():
    with torch.inference_mode():
        stream = RandomStream(0)
    assert not stream.step_tensor.is_inference()


def test_a_stream_can_return_to_an_earlier_micro_batch_and_back():
    stream = RandomStream(1)
    for _ in range(3):
        stream.advance()
    with stream.at(1):
        assert stream.step == 1
    assert stream.step == 3


def test_a_finished_micro_batch_is_followed_by_another_once():
    stream = RandomStream(0)
    assert not stream.is_finished(0)
    stream.finish(0)
    assert stream.is_finished(0)
    assert [stream.begin(0), stream.begin(0), stream.step] == [1, 1, 1]  # the second layer still reads 0
    assert not stream.is_finished(1)
    stream.finish(1)
    stream.finish(0)  # a later backward of an earlier forward
    assert stream.is_finished(1)


def test_a_loaded_micro_batch_is_finished_and_copies_know_whether_theirs_is():
    stream = RandomStream(0)
    stream.load_state_dict({"seed": 0, "step": 7})
    assert stream.is_finished(7)
    assert copy.deepcopy(stream).is_finished(7)
    stream.begin(7)
    assert not copy.deepcopy(stream).is_finished(8)
    older = RandomStream(1)
    older.__setstate__({"seed": 0, "rank": None, "step": 5})
    assert older.is_finished(5)
