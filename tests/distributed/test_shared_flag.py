"""An overflow on one rank is known to the other before either of them updates; without an engine."""

import json
from pathlib import Path

import pytest
from forks import run_processes

PROGRAM = Path(__file__).with_name("ranks_shared_flag.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both ranks reported."""
    folder = tmp_path_factory.mktemp("ranks")
    codes, outputs = run_processes(PROGRAM, folder, folder=folder)
    assert codes == [0, 0], "\n".join(outputs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_both_ranks_skip_the_step_in_which_one_has_an_infinite_gradient(seen):
    for rank in seen:
        (is_applied, norm, moved), (is_second_applied, _, after) = rank["steps"]
        assert (is_applied, norm, moved) == (True, 2.0, -2.0)
        assert (is_second_applied, after) == (False, -2.0)


def test_the_flag_and_the_norm_of_pieces_are_those_of_all_ranks(seen):
    for rank in seen:
        finite, (is_flag_set, _) = rank["pieces"]
        assert finite == [False, 5.0]
        assert is_flag_set
