"""Two real ranks with overflowing gradients: both skip, name the tensor, and stay equal."""

import math
from itertools import pairwise

import pytest

# tensor named, its rank, ranks that overflowed, how many gradients of the named rank
WHERE = {
    "inf": ("body.3.weight", 1, [1], 1),
    "nan": ("body.0.bias", 1, [1], 1),
    "first": ("body.0.weight", 0, [0], 1),
    "both": ("body.0.weight", 0, [0, 1], 1),
    "apart": ("body.3.bias", 1, [0, 1], 2),  # backward comes to the last layer first
}
SKIPPED = [False, None, None]


@pytest.fixture(scope="module")
def seen(launch_ranks):
    """What both ranks of ranks_overflow.py reported; launched once for all tests of this file."""
    return launch_ranks("ranks_overflow.py").wait(timeout=90)


@pytest.mark.parametrize("loop", ["engine", "local_ddp"])
@pytest.mark.parametrize("spill", WHERE)
def test_both_ranks_skip_and_name_the_first_tensor_and_its_rank(seen, loop, spill):
    one, other = (rank[loop][spill] for rank in seen)
    assert one == other
    assert one["tuple"] == SKIPPED
    assert not one["has_moved"]
    assert (one["tensor"], one["rank"], one["ranks"], one["num_tensors"]) == WHERE[spill]


def test_the_report_is_the_line_that_a_log_shows(seen):
    for rank in seen:
        for loop in ("engine", "local_ddp"):
            assert rank[loop]["inf"]["text"] == (
                "skipped at loss scale 64: overflow in body.3.weight on rank 1"
            )
            assert rank[loop]["apart"]["text"].endswith(
                "body.3.bias on rank 1 (first of 2 of 4 gradients, 2 ranks overflowed)"
            )


def test_an_overflow_of_gradients_averaged_in_backward_names_the_tensor_but_no_rank(seen):
    for rank in seen:
        clean, bad, after = rank["torch_ddp"]["steps"]
        assert [step["has_moved"] for step in (clean, bad, after)] == [True, False, True]
        assert bad["tuple"] == SKIPPED
        assert bad["text"] == "skipped at loss scale 64: overflow in body.0.weight"
        assert (bad["rank"], bad["ranks"]) == (None, [0, 1])
    assert seen[0]["torch_ddp"]["weights"] == seen[1]["torch_ddp"]["weights"]


def test_ranks_that_average_nothing_skip_together_and_name_the_rank(seen):
    one, other = (rank["without_averaging"] for rank in seen)
    assert [step["text"] for step in one] == [step["text"] for step in other]
    for steps in (one, other):
        assert [step["has_moved"] for step in steps] == [True, False, False, True]
        assert [step["tensor"] for step in steps] == [None, "body.3.weight", "body.3.bias", None]
        assert [step["rank"] for step in steps] == [None, 1, 1, None]
        assert [step["ranks"] for step in steps] == [None, [1], [0, 1], None]
    assert [step["tuple"] for step in one] == [step["tuple"] for step in other]


def test_an_overflow_after_averaging_is_named_with_its_rank_only_if_ranks_differ(seen):
    for rank in seen:
        everywhere, on_one = rank["after_averaging"]
        assert everywhere["tuple"] == on_one["tuple"] == SKIPPED
        assert everywhere["text"] == "skipped at loss scale 64: overflow in body.0.weight"
        assert (everywhere["rank"], everywhere["ranks"]) == (None, [0, 1])
        assert (on_one["tensor"], on_one["rank"], on_one["ranks"]) == ("body.0.weight", 1, [1])


@pytest.mark.parametrize("kind", ["constant", "dynamic"])
def test_random_overflows_leave_ranks_equal_and_act_as_if_those_batches_were_left_out(seen, kind):
    """Powers of two scale fp16 gradients without a rounding, as long as none is subnormal."""
    (run, without), (other, other_without) = (rank["runs"][kind] for rank in seen)
    assert run == other
    assert without == other_without
    for name in ("weights", "masters", "state", "lr"):
        assert run[name] == without[name], name
    assert [step for step, applied in enumerate(run["applied"]) if not applied] == seen[0]["bad"]
    assert len(seen[0]["bad"]) == 6
    assert all(without["applied"])
    assert run["was_clipped"]
    if kind == "dynamic":
        assert len(set(run["scales"])) > 2
    else:
        assert set(run["scales"]) == {4096.0}


def test_random_overflows_inside_the_engine_leave_ranks_equal(seen):
    (run, without), (other, _) = (rank["engine_runs"] for rank in seen)
    assert run == other
    assert run["weights"] == without["weights"]
    assert run["lr"] == without["lr"]  # a warm-up, which moves on success only
    assert [step for step, applied in enumerate(run["applied"]) if not applied] == seen[0]["bad"]
    assert all(without["applied"])


@pytest.mark.parametrize("groups", [0, 1], ids=["a group of its own", "all ranks"])
def test_an_overflow_in_one_ranks_expert_skips_every_optimizer_on_every_rank(seen, groups):
    steps = [rank["chained"][groups]["steps"] for rank in seen]
    for of_rank in steps:
        assert [step["has_moved"] for step in of_rank] == [[True] * 4, [False] * 4, [False] * 4, [True] * 4]
        assert [step["scale"] for step in of_rank] == [64.0, 32.0, 16.0, 16.0]
        assert of_rank[1]["text"].endswith("overflow in expert.weight on rank 1")
        assert of_rank[2]["text"].endswith("overflow in dense.bias on rank 0")
        assert of_rank[0]["tuple"][1] > 0.1  # clipped
    assert [step["tuple"] for step in steps[0]] == [step["tuple"] for step in steps[1]]
    assert seen[0]["chained"][groups]["dense"] == seen[1]["chained"][groups]["dense"]


def test_the_largest_gradient_of_both_ranks_sets_one_scale(seen):
    one, other = (rank["strategies"]["max_value"] for rank in seen)
    assert one["scales"] == other["scales"]
    assert one["weights"] == other["weights"]
    assert one["own"] != other["own"]
    for step, own in enumerate(zip(one["own"], other["own"], strict=True)):
        before, after = one["scales"][step : step + 2]
        wanted = 2.0 ** math.floor(math.log2(2.0**15 / max(own)))  # the target, and no memory
        assert after == min(wanted, 2 * before)
    assert one["scales"][-1] > one["scales"][0]


def test_underflow_on_one_rank_raises_the_scale_of_both(seen):
    one, other = (rank["strategies"]["norm_ratio"] for rank in seen)
    assert one["scales"] == other["scales"]
    assert one["weights"] == other["weights"]
    octaves = [math.log2(scale) for scale in one["scales"]]
    moves = [after - before for before, after in pairwise(octaves)]
    # every second step is probed, and a probe that finds a loss is worth an octave
    assert moves[:4] == [1.0, 0.0, 1.0, 0.0]
    assert not any(moves[1::2])


def test_a_strategy_makes_the_same_decisions_inside_the_engine(seen):
    one, other = (rank["strategies"]["engine"]["scales"] for rank in seen)
    assert one == other == [2.0 ** (5 + step) for step in range(6)]


def test_shards_count_together_replicas_once_and_shared_ones_never(seen):
    for number, rank in enumerate(seen):
        clean, bad_shard, bad_shared = rank["sharded"]
        assert clean["tuple"] == [True, 13.0, 2]  # 3² + 4² + 12²; a zero in each shard
        shard, replica, shared = clean["weights"]
        assert shard == pytest.approx([-1.5, 0.0] if number == 0 else [-2.0, 0.0], rel=1e-6)
        assert replica == pytest.approx([-6.0], rel=1e-6)
        assert shared == pytest.approx([-50.0], rel=1e-6)  # clipped and stepped
        for bad, name in ((bad_shard, "shard"), (bad_shared, "shared")):
            assert bad["tuple"] == SKIPPED
            assert (bad["tensor"], bad["rank"]) == (name, 1)
            assert bad["weights"] == [[0.0, 0.0], [0.0], [0.0]]


def test_pipeline_stages_all_count_if_their_copies_are_elsewhere(seen):
    for rank in seen:
        norm, of_first_alone = rank["stages"]
        assert norm == [True, 13.0, 1]  # 3² + 4² + 12²
        assert of_first_alone == [True, 5.0, 1]  # what is not marked is taken for a copy of the first rank's


def test_a_rank_without_any_parameter_takes_part(seen):
    for rank in seen:
        clean, bad = rank["rank_without_parameters"]
        assert clean["tuple"] == [True, 5.0, None]
        assert bad["text"] == "skipped at loss scale 1: overflow in p0 on rank 0"
    assert seen[0]["rank_without_parameters"][0]["weights"][0] == pytest.approx([-1.5, -2.0], rel=1e-5)
    assert seen[0]["rank_without_parameters"][1]["weights"] == [[0.0, 0.0]]
    assert [rank["strategy_without_parameters"] for rank in seen] == [[8.0, 16.0, 32.0, 64.0]] * 2


def test_a_loop_that_averages_gradients_itself_is_measured_after_averaging(seen):
    """A collective moves no version counter: sums taken during backward would be those of one rank."""
    for rank in seen:
        clean, bad = rank["by_hand"]["steps"]
        assert clean["tuple"][1] == pytest.approx(clean["norm"], rel=1e-6)
        assert bad["tuple"] == SKIPPED
        assert bad["rank"] is None
    assert seen[0]["by_hand"]["weights"] == seen[1]["by_hand"]["weights"]
