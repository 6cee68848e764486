import json
import math

import pytest
from quick_cases import slow_except

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.layers.conversion.carried_state import split_counts
from megalowbit.pretrain import overflow_retry
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.resume import changed_settings
from megalowbit.pretrain.run import pretrain

STEPS = 4
SPLIT = '{"base": "nvfp4", "split_input": {"method": "qb", "rank": 4}}'


def run_of(build_job, initial_scale, retries, *overrides):
    """Facts of each step, and the job after them."""
    job = build_job(
        "megalowbit.precision=fp16",
        f'megalowbit.grad_scaler={{"initial_scale": {initial_scale}, "hysteresis": 2}}',
        f"megalowbit.run.overflow_retries={retries}",
        *overrides,
    )
    return [train_step(job) for _ in range(STEPS)], job


@pytest.mark.parametrize("recipe", slow_except([SPLIT], ["nvfp4", SPLIT]))
def test_with_retries_the_run_equals_one_that_started_at_the_right_scale(build_job, recipe):
    override = f"megalowbit.recipe={recipe}"
    found, job = run_of(build_job, 2.0**26, 20, override)
    right = found[0][0]["loss_scale"]
    assert right < 2.0**26
    expected, other = run_of(build_job, right, 20, override)
    assert found[0][0]["overflow_retries"] == 26 - math.log2(right)  # an octave each
    assert "overflow_retries" not in expected[0][0]
    assert not any(step.is_skipped for step in [*found, *expected])
    for number, ((mine, *_), (theirs, *_)) in enumerate(zip(found, expected, strict=True)):
        varying = SPEEDS | ({"overflow_retries"} if number == 0 else set())
        assert {k: v for k, v in mine.items() if k not in varying} == {
            k: v for k, v in theirs.items() if k not in varying
        }
    assert job.loader.position == other.loader.position
    assert job.engine.global_steps == other.engine.global_steps == STEPS
    assert split_counts(job.engine.module) == split_counts(other.engine.module)
    weights, same = ([p.tolist() for p in each.engine.module.parameters()] for each in (job, other))
    assert weights == same


def test_labels_are_counted_once_a_step_and_not_in_each_attempt(build_job, monkeypatch):
    counted, count = [], overflow_retry.mean_num_labels
    monkeypatch.setattr(
        overflow_retry, "mean_num_labels", lambda *given: counted.append(given) or count(*given)
    )
    overrides = ("megalowbit.data.packing=documents", "megalowbit.data.eod_mask_loss=true")
    found, _ = run_of(build_job, 2.0**26, 20, *overrides)
    assert found[0][0]["overflow_retries"] > 1
    assert len(counted) == STEPS
    right, _ = run_of(build_job, found[0][0]["loss_scale"], 20, *overrides)
    assert [step[0]["loss"] for step in found] == [step[0]["loss"] for step in right]


def test_without_retries_the_same_run_loses_steps(build_job):
    found, _ = run_of(build_job, 2.0**26, 0)
    assert found[0][1]


def test_a_step_out_of_retries_is_skipped(build_job):
    found, job = run_of(build_job, 2.0**32, 1)
    assert found[0][1]
    assert found[0][0]["overflow_retries"] == 1
    assert found[0][0]["loss_scale"] == 2.0**31
    (line,) = found[0][2]  # of the first try; the step's own is that of the last
    assert line.startswith("step 1 overflowed: overflow in transformer.")
    assert line.endswith("loss scale 2^32 → 2^31")
    assert job.engine.skipped_steps == sum(step.is_skipped for step in found)
    assert job.step == STEPS


def test_retries_are_in_the_metrics_and_the_log_of_a_run(resolve, tmp_path, capsys):
    config = resolve(
        "megalowbit.precision=fp16",
        'megalowbit.grad_scaler={"initial_scale": 67108864}',
        "megalowbit.run.overflow_retries=20",
        "megalowbit.run.steps=4",
    )
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["overflow_retries"] > 0
    assert capsys.readouterr().out.count("; retried") == sum(row.get("overflow_retries", 0) for row in rows)
    assert "overflow_retries" not in rows[-1]
    assert [row["skipped_steps"] for row in rows] == [0] * 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["megalowbit.precision=bf16"],
        ["megalowbit.precision=fp16", 'megalowbit.grad_scaler={"type": "constant", "scale": 8}'],
    ],
)
def test_retries_without_a_variable_loss_scale_are_rejected(resolve, overrides):
    with pytest.raises(UserError, match="overflow_retries = 2 needs a loss scale that can be lowered"):
        resolve("megalowbit.run.overflow_retries=2", *overrides)


def test_a_run_of_an_earlier_version_is_resumed_without_warnings(resolve):
    now = resolve().to_dict()
    before = json.loads(json.dumps(now))
    del before["megalowbit"]["run"]["overflow_retries"]
    del before["megalowbit"]["run"]["deterministic"]
    del before["megalowbit"]["watchdog"]["silence"]
    assert changed_settings(before, now) == []
