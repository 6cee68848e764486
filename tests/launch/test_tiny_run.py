"""The shipped tiny configuration learns: in its first steps, and to the loss that the README promises."""

import pytest
from forked_ranks import run_ranks
from quick_cases import slow_except

from launchers import ROOT, metrics, run

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "gpt2_tiny_fp4.json"


def mean_loss(rows):
    return sum(row["loss"] for row in rows) / len(rows)


# of 700 steps; number of steps, and the mean loss of the last of them that they must fall below
@pytest.mark.parametrize(("steps", "loss"), slow_except([(24, 4.0)], [(24, 4.0), (120, 3.0)]))
def test_the_first_steps_in_fp4_already_learn(steps, loss, tmp_path):
    done = run_ranks(
        "--ds-config", CONFIG, "--run-dir", tmp_path / "run",
        "--set", f"megalowbit.run.steps={steps}", "--set", "train_micro_batch_size_per_gpu=8",
        "--set", "megalowbit.checkpoint.export_hf=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    assert 5.2 < rows[0]["loss"] < 5.7  # ln 256 = 5.55
    assert mean_loss(rows[-steps // 6 :]) < loss


@pytest.mark.slow
def test_the_whole_run_falls_below_the_promised_loss(tmp_path):
    done = run(
        "deepspeed", "--ds-config", CONFIG, "--run-dir", tmp_path / "run",
        cwd=tmp_path, processes=2, seconds=1800,
    )  # fmt: skip
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    assert len(rows) == 700
    assert 5.2 < rows[0]["loss"] < 5.7
    assert mean_loss(rows[-50:]) < 2.6
