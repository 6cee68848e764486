import philox_reference
import pytest
import torch

from megalowbit.quantize.philox import RandomKey, philox4x32, random_bytes, random_words

CPU = torch.device("cpu")


@pytest.mark.parametrize(("counter", "key", "output"), philox_reference.KNOWN_ANSWERS)
def test_the_published_known_answers_are_met(counter, key, output):
    words = philox4x32(tuple(torch.tensor([part]) for part in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == output
    assert philox_reference.philox(counter, key) == output


@pytest.mark.parametrize(
    ("key", "step"), [(0, 0), (1, 2), (2**32, 2**32), (2**64 - 1, 2**40 + 3), (0xFEDCBA9876543210, 7)]
)
def test_bytes_equal_philox_in_python_integers_group_by_group(key, step):
    drawn = random_bytes(20, RandomKey(key, step), CPU)
    assert drawn.shape == (20, 16)
    for group in range(20):
        assert bytes(drawn[group].tolist()) == philox_reference.random_bytes(group, key, step)


def test_bytes_are_the_words_in_little_endian_order():
    words = random_words(5, RandomKey(3), CPU)
    joined = [b"".join(word.to_bytes(4, "little") for word in row) for row in words.tolist()]
    assert [bytes(row) for row in random_bytes(5, RandomKey(3), CPU).tolist()] == joined


def test_both_halves_of_key_and_step_matter_and_a_draw_repeats():
    base = random_words(8, RandomKey(5, 9), CPU)
    assert torch.equal(base, random_words(8, RandomKey(5, 9), CPU))
    assert torch.equal(base[:3], random_words(3, RandomKey(5, 9), CPU))
    for other in (RandomKey(6, 9), RandomKey(5 + 2**32, 9), RandomKey(5, 10), RandomKey(5, 9 + 2**32)):
        assert (random_words(8, other, CPU) != base).all()


def test_bytes_are_even_and_uncorrelated_between_neighbours_steps_and_keys():
    draws = [random_bytes(1 << 14, RandomKey(*key), CPU).double() for key in ((1, 0), (1, 1), (2, 0))]
    size = draws[0].numel()
    for each in draws:
        counts = torch.bincount(each.flatten().long(), minlength=256)
        assert ((counts - size / 256) ** 2 / (size / 256)).sum() < 380  # chi-square, 255 degrees, p ≈ 1e-6
    first = draws[0].flatten() - 127.5
    for other in (draws[1].flatten() - 127.5, draws[2].flatten() - 127.5, first.roll(1), first.roll(16)):
        correlation = (first * other).mean() / first.square().mean()
        assert abs(correlation.item()) < 5 / size**0.5


def test_no_groups_draw_nothing():
    assert random_bytes(0, RandomKey(1), CPU).shape == (0, 16)
