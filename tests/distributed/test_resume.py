"""A run stopped and resumed in new processes equals an uninterrupted run bitwise."""

import pytest

SAVED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(launch_ranks, folder):
    return launch_ranks("ranks_resume.py", folder, "whole").wait(timeout=90)


@pytest.fixture(scope="module")
def resumed(launch_ranks, folder, whole):
    return launch_ranks("ranks_resume.py", folder, "resume").wait(timeout=90)


@pytest.fixture(scope="module")
def resumed_by_three(launch_ranks, folder, whole):
    ranks = launch_ranks("ranks_resume.py", folder, "resume", world_size=3)
    return ranks.wait(timeout=90), ranks.output()


def test_losses_lr_norm_scale_and_random_draws_are_bitwise_the_same(whole, resumed):
    for uninterrupted, continued in zip(whole, resumed, strict=True):
        assert continued["steps"] == uninterrupted["steps"][SAVED:]
        assert continued["weights"] == uninterrupted["weights"]


def test_ranks_draw_different_dropout_masks(whole):
    assert whole[0]["steps"][0]["draws"] != whole[1]["steps"][0]["draws"]


def test_the_run_has_all_state_that_a_checkpoint_must_hold(whole):
    scales = [step["scale"] for step in whole[0]["steps"]]
    assert scales[SAVED - 1] != scales[0]
    lrs = [step["lr"][0] for step in whole[0]["steps"]]
    assert lrs[SAVED] != lrs[SAVED - 1]


def test_every_rank_gets_back_the_split_directions_of_its_own_data(whole, resumed):
    assert [rank["has_own_state"] for rank in resumed] == [True, True]
    assert whole[0]["directions"] != whole[1]["directions"]
    assert [rank["directions"] for rank in resumed] == [rank["directions"] for rank in whole]
    assert [rank["splits"]["cold"] for rank in whole] == [6, 6]  # two layers, three operands each
    assert [rank["splits"] for rank in resumed] == [rank["splits"] for rank in whole]


def test_client_state_comes_back_on_every_rank(resumed):
    assert [r["client_state"] for r in resumed] == [{"step": 5, "note": {"nested": [1, 2]}}] * 2


def test_all_ranks_raise_the_same_error_together(whole):
    assert whole[0]["errors"] == whole[1]["errors"]
    exists, full, missing = whole[0]["errors"]
    assert "step-00000005 already exists" in exists
    assert "step-00000077 was not written (rank 0)" in full
    assert "earlier checkpoints are untouched" in full
    assert "step-00000004 does not exist" in missing


def test_a_defect_of_one_rank_ends_the_save_on_all(whole):
    assert whole[1]["defect"] == "KeyError: 'gone'"
    assert whole[0]["defect"].startswith(
        "RuntimeError: checkpoint step-00000078 was not written: rank 1 failed"
    )
    assert "KeyError: 'gone'" in whole[0]["defect"]


def test_a_full_disk_or_a_defect_leaves_only_the_old_checkpoint(whole):
    assert whole[0]["left"] == [
        "latest",
        "step-00000005",
        "step-00000005/manifest.json",
        "step-00000005/mp_rank_00_model_states.pt",
        "step-00000005/rank_00000.pt",
        "step-00000005/rank_00001.pt",
    ]


@pytest.mark.slow
def test_another_number_of_ranks_continues_with_a_warning(resumed_by_three, whole):
    results, output = resumed_by_three
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert results[0]["steps"][0]["scale"] == whole[0]["steps"][SAVED]["scale"]
    assert results[0]["steps"][0]["lr"] == whole[0]["steps"][SAVED]["lr"]
    assert "checkpoint of 2 processes continued with 3" in output
    assert "rank 2 was not part of the saved run" in output
    assert [rank["has_own_state"] for rank in results] == [True, True, False]


@pytest.mark.slow
def test_weights_resume_with_the_same_directions_on_a_new_rank_too(resumed_by_three, whole):
    assert whole[0]["weight_directions"] == whole[1]["weight_directions"]
    results, _ = resumed_by_three
    first, second, new = [rank["weight_directions"] for rank in results]
    assert first == second == new
    assert [rank["splits"]["cold"] for rank in results] == [6, 6, 6]
    ways = [rank["splits"] for rank in results]
    assert (
        ways[2]["warm"] + ways[2]["reused"] < ways[0]["warm"] + ways[0]["reused"]
    )  # not there from the start
