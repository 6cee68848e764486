"""Models that get their weights one by one on two ranks, against the model built in one process."""

import pytest
from quick_cases import slow_except

QUICK = {"0", "2", "3", "pipeline", "tensor"}
LAYOUTS = [
    "0", "1", "2", "3", "3 persistent", "2 offload", "3 offload", "pipeline", "pipeline 1", "tensor",
    "tensor 1", "tensor 3",
]  # fmt: skip


@pytest.fixture
def seen(launch_once, part):
    """What both ranks reported."""
    return launch_once("ranks_start_weights.py", part)


@pytest.mark.parametrize("layout", slow_except(QUICK, LAYOUTS))
def test_masters_weights_and_exports_have_the_bits_of_one_process(seen, layout):
    for rank in seen:
        assert len(rank[layout]) >= 2
        assert all(wrong == [] for wrong in rank[layout].values()), rank[layout]


def test_a_model_whose_checkpoint_is_loaded_later_is_zero(seen):
    for rank in seen:
        assert rank["zeros"]
        assert set(rank["zeros"]) == {0.0}


@pytest.mark.parametrize("stage", ["0", "3"])
def test_an_error_of_the_rank_that_reads_ends_all_with_its_line(seen, stage):
    for number, rank in enumerate(seen):
        assert rank["errors"][f"gone {stage}"] == "UserError: the folder is gone: bring it back"
        damaged = rank["errors"][f"damaged {stage}"]
        assert damaged.startswith("UserError: weight model.layers.1.")
        assert damaged.endswith(" is damaged: use another folder")
        defect = rank["errors"][f"defect {stage}"]
        expected = (
            "AttributeError: 'NoneType'" if number == 0 else "RuntimeError: rank 0 failed: AttributeError"
        )
        assert defect.startswith(expected)


def test_ranks_of_which_one_has_no_weights_end_with_one_line(seen):
    """Otherwise one would wait in a broadcast for the other."""
    for rank in seen:
        assert rank["errors"]["one rank has none"].startswith(
            "ranks disagree on argument weights: StartWeights on rank 0, NoneType on rank 1"
        )
