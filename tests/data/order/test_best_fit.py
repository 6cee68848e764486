"""Best-fit packing against a plain program that places one document after another."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalowbit.data.order import best_fit
from megalowbit.data.order.best_fit import BestFitPlan, best_fit_plan

END = 0


def tokens_of(lengths):
    """Documents that consist of their own number, from 1 on."""
    documents = [[number] * (length - 1) + [END] for number, length in enumerate(lengths, start=1)]
    return np.array([token for each in documents for token in each], dtype=np.uint16)


def one_after_another(lengths, size):
    """Lengths of the pieces of each sample, in the order in which they were placed."""
    pieces = [piece for each in lengths for piece in [size] * (each // size) + [each % size] if piece]
    samples = []
    for piece in sorted(pieces, reverse=True):
        fitting = [each for each in samples if size - sum(each) >= piece]
        if fitting:
            max(fitting, key=sum).append(piece)
        else:
            samples.append([piece])
    return samples


def pieces_of(plan):
    starts, lengths = plan.starts.tolist(), plan.lengths.tolist()
    bounds = plan.bounds.tolist()
    return [[(starts[i], lengths[i]) for i in range(first, stop)] for first, stop in pairwise(bounds)]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=60), st.integers(2, 12))
@example([1, 4, 9, 14, 19], 12)  # two samples with room for one token
def test_a_plan_is_that_of_one_document_after_another(lengths, size):
    tokens = tokens_of(lengths)
    found = pieces_of(best_fit_plan(np.concatenate([tokens, [7, 7]]), END, size))
    expected = one_after_another(lengths, size)
    # samples with as much room are equal, so either may get a piece; their lengths are the same
    assert sorted(sum(length for _, length in each) for each in found) == sorted(map(sum, expected))
    assert sorted(length for each in found for _, length in each) == sorted(chain.from_iterable(expected))
    seen = sorted((start, start + length) for each in found for start, length in each)
    assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]  # each token once
    assert seen[-1][1] == len(tokens)  # what no end follows is left out
    for start, stop in seen:
        assert stop - start == size or tokens[stop - 1] == END
        assert END not in tokens[start : stop - 1]


def test_a_plan_is_read_as_it_was_written_and_blocks_do_not_matter(tmp_path, monkeypatch):
    numbers = np.random.default_rng(1)
    tokens = tokens_of(numbers.geometric(0.01, 3000).tolist())
    plan = best_fit_plan(tokens, END, 256)
    plan.save(tmp_path / "plan.npy")
    monkeypatch.setattr(best_fit, "SCANNED_AT_ONCE", 1000)
    for other in (BestFitPlan.load(tmp_path / "plan.npy"), best_fit_plan(tokens, END, 256)):
        for name in ("bounds", "starts", "lengths"):
            assert np.array_equal(getattr(plan, name), getattr(other, name))
    padding = 1 - len(tokens) / (256 * (len(plan.bounds) - 1))
    assert 0 <= padding < 0.002


@pytest.mark.slow
def test_a_million_documents_fit_and_fill_their_samples():
    numbers = np.random.default_rng(1)
    lengths = np.minimum(numbers.lognormal(6, 1.2, 10**6).astype(np.int64) + 1, 60_000)
    _, pieces = best_fit._pieces(np.concatenate([[0], np.cumsum(lengths)]), 2048)
    sample = best_fit._place(np.sort(pieces)[::-1], 2048)
    filled = np.bincount(sample, weights=np.sort(pieces)[::-1])
    assert filled.max() <= 2048
    assert 1 - filled.sum() / (2048 * len(filled)) < 1e-3
