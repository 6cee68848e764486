import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import slow_except

from megalowbit.data.order.permutation import sample_index

WORD = 2**64 - 1


def splitmix64(word: int) -> int:
    """The published generator's output for state `word`, in plain integers."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def index_by_hand(seed: int, epoch: int, position: int, num_samples: int) -> int:
    key = splitmix64(splitmix64(seed) ^ epoch)
    bits = (num_samples - 1).bit_length()
    low_bits, high_bits = bits - bits // 2, bits // 2
    value = position
    while True:
        high, low = value >> low_bits, value & ((1 << low_bits) - 1)
        for number in range(12):
            round_key = (key + number * 0x9E3779B97F4A7C15) & WORD
            if number % 2 == 0:
                low ^= splitmix64(high ^ round_key) & ((1 << low_bits) - 1)
            else:
                high ^= splitmix64(low ^ round_key) & ((1 << high_bits) - 1)
        value = high << low_bits | low
        if value < num_samples:
            return value


def permutation(seed, epoch, num_samples):
    return sample_index(seed, epoch, np.arange(num_samples), num_samples)


@pytest.mark.parametrize(
    "num_samples", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 97, 128, 255, 256, 257, 1009, 65536, 94682]
)
def test_an_epoch_visits_every_sample_once(num_samples):
    assert np.array_equal(np.sort(permutation(1, 0, num_samples)), np.arange(num_samples))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_an_epoch_visits_every_sample_once_for_any_seed_and_epoch(num_samples, seed, epoch):
    assert np.array_equal(np.sort(permutation(seed, epoch, num_samples)), np.arange(num_samples))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_order_equals_plain_integer_arithmetic(data):
    num_samples = data.draw(st.integers(1, 2**62))
    seed, epoch = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 10**9))
    position = data.draw(st.integers(0, num_samples - 1))
    assert int(sample_index(seed, epoch, position, num_samples)) == index_by_hand(
        seed, epoch, position, num_samples
    )


def test_the_order_is_unchanged_since_earlier_versions():
    # Checkpoints hold positions: another order would make resumed runs read other samples.
    assert permutation(0, 0, 10).tolist() == [3, 7, 1, 6, 5, 9, 4, 0, 2, 8]
    assert permutation(1234, 7, 7).tolist() == [4, 5, 0, 6, 2, 1, 3]
    assert sample_index(42, 3, np.array([0, 1, 10**12 - 1]), 10**12).tolist() == [
        301107480711,
        417230768244,
        397605302984,
    ]


def test_positions_of_two_epochs_in_one_call():
    epochs, positions = np.divmod(np.arange(95, 105), 100)
    expected = [*permutation(9, 0, 100)[95:], *permutation(9, 1, 100)[:5]]
    assert sample_index(9, epochs, positions, 100).tolist() == [int(index) for index in expected]


def test_order_keeps_the_shape_of_its_input():
    assert sample_index(0, 0, np.zeros((2, 0, 3), np.int64), 5).shape == (2, 0, 3)
    assert sample_index(0, np.zeros((4, 1)), np.zeros(3), 5).shape == (4, 3)


@pytest.mark.parametrize("other", [(1, 1), (2, 0)])
def test_epochs_and_seeds_have_unrelated_orders(other):
    first, second = permutation(1, 0, 10_000), permutation(*other, 10_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05  # 5 standard deviations
    assert (first == second).sum() < 12  # a Poisson of mean 1


def test_the_order_has_no_trend_and_separates_neighbours():
    for num_samples in (1000, 4096, 65537):
        order = permutation(5, 2, num_samples)
        bound = 5 / np.sqrt(num_samples)
        assert abs(np.corrcoef(np.arange(num_samples), order)[0, 1]) < bound
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
        assert (np.abs(np.diff(order)) == 1).sum() < 16  # a Poisson of mean 2


@pytest.mark.parametrize("num_samples", slow_except([3, 8], [2, 3, 5, 8]))
def test_small_sets_start_with_each_sample_equally_often(num_samples):
    firsts = [int(sample_index(seed, 0, 0, num_samples)) for seed in range(3000)]
    expected = 3000 / num_samples
    chi_square = ((np.bincount(firsts, minlength=num_samples) - expected) ** 2 / expected).sum()
    assert chi_square < 30


@pytest.mark.parametrize(("position", "num_samples"), [(10, 10), (-1, 10), (0, 0), (0, 2**62 + 1)])
def test_order_rejects_positions_out_of_range(position, num_samples):
    with pytest.raises(ValueError, match="must be"):
        sample_index(0, 0, position, num_samples)
