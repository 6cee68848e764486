import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.distributed.generator_states import (
    has_same_sharding,
    packed_random_state,
    random_state,
    restore_random_state,
    saved_random_state,
    saved_rank_of,
    seed_generators,
)
from megalowbit.distributed.process_grid import ProcessGrid

CPU = torch.device("cpu")


def draws():
    python = [random.gauss(0, 1), random.random()]
    return [*torch.rand(3).tolist(), *python, *np.random.rand(2).tolist(), float(np.random.randn())]


@given(st.integers(0, 2**31), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_every_generator_continues_where_it_was(tmp_path_factory, seed, used):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for _ in range(used):
        draws()
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(random_state(CPU), path)
    expected = draws()
    draws()
    restore_random_state(torch.load(path, weights_only=True), CPU)
    assert draws() == expected


def test_generators_continue_from_a_row_among_those_of_other_ranks(tmp_path):
    rows, expected = [], []
    for seed in range(3):
        seed_generators(seed, 0)
        rows.append(packed_random_state(CPU))
        expected.append(draws())
    longest = max(map(len, rows)) + 5  # what fills a row up is not read
    states = torch.tensor([list(row.ljust(longest, b"\0")) for row in rows], dtype=torch.uint8)
    torch.save(states, tmp_path / "states.pt")
    states = torch.load(tmp_path / "states.pt", weights_only=True, mmap=True)
    for rank in (2, 0, 1):
        restore_random_state(saved_random_state(states, rank), CPU)
        assert draws() == expected[rank]


def test_generators_continue_from_a_list_as_older_checkpoints_have_it():
    seed_generators(1, 0)
    states = [random_state(CPU), {}]
    expected = draws()
    restore_random_state(saved_random_state(states, 0), CPU)
    assert draws() == expected


def test_a_missing_rank_is_seeded_by_step_and_rank_alone():
    def run(step, rank):
        return seed_generators(step, rank), draws()

    assert run(40, 2) == run(40, 2)
    assert len({run(step, rank)[0] for step in (40, 41) for rank in range(8)}) == 16


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (1, 1), (2, None)])
def test_data_parallel_ranks_find_their_own_states(rank, expected):
    assert saved_rank_of(None, 2, ProcessGrid(rank, 3)) == expected


def test_sharding_does_not_depend_on_the_number_of_data_parallel_ranks():
    saved = {"tensor_size": 1, "pipeline_size": 2}
    assert has_same_sharding(saved, ProcessGrid(0, 4, 1, 2))
    assert has_same_sharding(None, ProcessGrid(1, 3))
    for other in (ProcessGrid(0, 2), ProcessGrid(0, 2, 2), ProcessGrid(0, 4, 1, 4)):
        assert not has_same_sharding(saved, other)


def test_ranks_of_another_grid_take_the_states_of_their_data():
    saved = {"tensor_size": 2, "pipeline_size": 1}  # ranks 0, 1 have the first data, 2, 3 the second
    assert [saved_rank_of(saved, 4, ProcessGrid(rank, 4, 2)) for rank in range(4)] == [0, 1, 2, 3]
    assert [saved_rank_of(saved, 4, ProcessGrid(rank, 2)) for rank in range(2)] == [0, 2]
    whole = {"tensor_size": 1, "pipeline_size": 1}
    assert [saved_rank_of(whole, 2, ProcessGrid(rank, 4, 2)) for rank in range(4)] == [0, 0, 1, 1]
    assert [saved_rank_of(whole, 2, ProcessGrid(rank, 4, 1, 2)) for rank in range(4)] == [0, 1, 0, 1]
