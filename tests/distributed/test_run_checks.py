"""Runs that every rank rejects before the first step, with the same line and without waiting."""

from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "gpt2_tiny_fp4.json"
SAID = {
    "seed": "ranks disagree on seed: 0 on rank 0, 1 on rank 1; start every rank with the same one",
    "recipe": 'ranks disagree on configuration key megalowbit.recipe: "nvfp4" on rank 0, "mxfp4" on rank 1; '
    "give every rank the same configuration",
    "configuration": "ranks disagree on configuration key optimizer.params.lr: 0.01 on rank 0, 0.5 on rank "
    "1; give every rank the same configuration",
    "vocabulary": "ranks disagree on parameter count: 321 on rank 0, 337 on rank 1 "
    "(and on 1 more, such as parameter ballast.weight); build the same model on every rank",
    "frozen": "ranks disagree on parameter body.0.bias: float32 (16,) on rank 0, float32 (16,) frozen on "
    "rank 1; build the same model on every rank",
    "backend": "ranks disagree on environment variable MEGALOWBIT_BACKEND: None on rank 0, 'torch' on rank "
    "1; export the same value on every node",
    "version": "ranks disagree on version of torch: 2.0 on rank 0, 2.1 on rank 1; "
    "install the same packages on every node",
    "one_sided_mpu": "ranks disagree on argument mpu: NoneType on rank 0, GroupsOfRank on rank 1; "
    "call megalowbit.initialize with the same arguments on every rank",
    "broken_mpu": "rank 1: mpu has no get_tensor_model_parallel_group(): "
    "initialise Megatron's parallel state, or add it",
    "lost_layer": "rank 1: DeepSpeed replaced 1 of 2 low-bit layers (body.0 is Linear): "
    "turn off the options that replace layers in the configuration",
    "user_error": "rank 1: mend it",
}
BEGINNINGS = {
    "precision": "ranks disagree on configuration key megalowbit.",
    "shapes": "ranks disagree on parameter body.0.weight: float32 (16, 8) on rank 0, float16 (16, 8) on",
    "names": "ranks disagree on parameter body.0.weight: float32 (16, 8) on rank 0, none on rank 1",
    "code": "ranks disagree on code of megalowbit: ",
    "unreadable": "rank 1: ",
}


@pytest.fixture(scope="module")
def seen(launch_ranks):
    """What both ranks of ranks_run_checks.py reported; launched once for all tests of this file."""
    return launch_ranks("ranks_run_checks.py").wait(timeout=120)


@pytest.mark.parametrize("case", SAID)
def test_a_disagreement_is_refused_on_both_ranks_with_one_line(seen, case):
    assert [rank[case] for rank in seen] == [[SAID[case], True]] * 2


@pytest.mark.parametrize("case", BEGINNINGS)
def test_the_difference_comes_first_in_the_line(seen, case):
    line, is_on_all_ranks = seen[0][case]
    assert is_on_all_ranks
    assert seen[1][case] == [line, True]
    assert line.startswith(BEGINNINGS[case])
    assert "\n" not in line


def test_ranks_with_different_parts_of_a_model_may_differ(seen):
    for rank in seen:
        of_parts, of_replicas = rank["other_parts"]
        assert of_parts is None
        assert of_replicas[0].startswith("ranks disagree on parameter w: float32 (1,) on rank 0")


def test_a_defect_on_one_rank_ends_the_others_and_keeps_its_type_there(seen):
    assert seen[0]["defect"] == ["RuntimeError: rank 1: OSError: disk", None]
    assert seen[1]["defect"] == ["OSError: disk", None]


def test_ranks_receive_shared_and_gathered_values(seen):
    for rank in seen:
        assert rank["shared"] == {"from": 1}
        assert rank["rows"] == [[97, 98, 99], [97, 98, 0]]


def test_a_scaler_that_is_not_ours_is_refused(seen):
    for rank in seen:
        foreign, own = rank["scaler"]
        assert "loss scaler is a deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler" in foreign[0]
        assert own is None


def test_ranks_that_agree_train_after_failed_starts(seen):
    for index, rank in enumerate(seen):
        assert rank["agreed"]["layers"] == ["body.0", "body.3"]
        assert rank["agreed"]["skipped"] == 0
        assert (rank["agreed"]["grid"], rank["agreed"]["data_rank"]) == ("data 2", index)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            ("--run-dir run --set megalowbit.run.seed=0", "--run-dir run --set megalowbit.run.seed=1"),
            "configuration key megalowbit.",
        ),
        (("--restart", "--run-dir run"), "restart"),
    ],
)
def test_the_command_line_ends_all_ranks_with_one_line_of_the_main_one(launch_ranks, options, what):
    ranks = launch_ranks("ranks_disagreeing_command.py", CONFIG, *options)
    codes = [process.wait(timeout=90) for process in ranks.processes]
    logs = [log.read_text() for log in ranks.logs]
    assert codes == [2, 2], logs
    said = [line for line in logs[0].splitlines() if "error" in line]
    assert len(said) == 1, logs[0]
    assert said[0].startswith(f"error: ranks disagree on {what}")
    assert "error" not in logs[1]
    assert "Traceback" not in logs[0] + logs[1]
    for log in logs:
        assert "left the group: True" in log, "a rank may be aborted by the end of another"
    assert "did not wait for rank 1: True" in logs[0]
    assert not (ranks.folder / "run").exists(), "a run that is refused leaves nothing behind"


def test_the_first_rank_alone_warns_of_a_schedule_that_the_loop_must_act_on(seen):
    first, second = (rank["warnings"] for rank in seen)
    assert len(first) == 1
    assert "megalowbit.late_switch is applied by launch/pretrain.py only" in first[0]
    assert second == []
