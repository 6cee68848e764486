"""Runs whose data make the loss NaN, or high, at chosen places; "batch 6" is what step 6 reads at first."""

import json
import math
import shutil
import signal
import threading

import pytest
import torch
from quick_cases import slow_except
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.job import assemble
from megalowbit.pretrain.loop import Ending, train
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS
from megalowbit.telemetry.sinks.console import Console

VARYING = {*SPEEDS, "rollbacks"}
AT_ONCE = 'megalowbit.loss_guard={"nonfinite": "rollback", "patience": 1}'
EVERY = ("megalowbit.run.steps=9", "megalowbit.checkpoint.every=4", "megalowbit.checkpoint.keep=null")
SPECULATION = 'megalowbit.speculation={"candidates": ["int8", "fp8", "bf16"], "threshold_db": 15, "every": 3}'
MERGED = '"parameter_split": {"rank": 4, "warmup_steps": 5, "merge_steps": 2, "merged_lr": 1e-3}'
SPLIT = '"split_weight": {"rank": 2, "refresh_every": 2}, "split_input": {"rank": 3}'


class Killed(BaseException):
    """The process is gone."""


def spoil(job, batches, factor=math.nan):
    """Multiply the loss of these batches."""
    samples = job.loader.samples_per_batch * job.accumulation_steps

    def hook(module, inputs, output):
        if (job.loader.position - 1) // samples + 1 in batches:
            output.loss = output.loss * factor

    job.engine.module.register_forward_hook(hook)


def kill_at(job, step, *, rollbacks):
    def hook(module, inputs, output):
        if job.step + 1 == step and len(job.loss_guard.rollbacks) == rollbacks:
            raise Killed

    job.engine.module.register_forward_hook(hook)


def ask_to_stop_at(job, step):
    def hook(module, inputs, output):
        if job.step + 1 == step:
            # not to the process: a thread that an earlier test has left does not block it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    job.engine.module.register_forward_hook(hook)


def run_until_stopped(job, step):
    """Let it be asked to stop at a step; the signal is gone afterwards."""
    ask_to_stop_at(job, step)
    assert run(job) is Ending.STOPPED
    signal.sigtimedwait(STOP_SIGNALS, 0)


def run(job, *, is_resume=False):
    """Train to the end, or until it is killed; how training ended."""
    console = Console(job.config.settings.run.steps, log_every=1)
    with Recorder(job, console, is_main=True, is_resume=is_resume) as recorder:
        try:
            ending = train(job, recorder)
        except Killed:
            return None
        if ending is Ending.DONE:
            recorder.finish()
        return ending


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def facts(rows):
    return [{key: value for key, value in row.items() if key not in VARYING} for row in rows]


def weights(job):
    return {name: tensor.clone() for name, tensor in job.engine.module.state_dict().items()}


def assert_same_weights(one, two):
    for (name, mine), theirs in zip(weights(one).items(), weights(two).values(), strict=True):
        assert torch.equal(mine, theirs), name


# the step whose batch is bad, and settings of the run
CASES = {
    "next": (5, ["gradient_accumulation_steps=1"]),  # one micro-batch after the checkpoint
    "stage 3": (6, ["zero_optimization.stage=3"]),
    "fp16": (
        6,
        [
            "megalowbit.precision=fp16",
            'megalowbit.grad_scaler={"type": "max_norm", "probe_every": 2, "growth_interval": 2}',
            'megalowbit.layer_scaling={"enabled": true}',
        ],
    ),
    "speculation": (6, ["megalowbit.recipe=speculative-int8", SPECULATION, "megalowbit.late_switch.at=5"]),
    "switch": (6, ['megalowbit.late_switch={"at": 4, "scope": "all"}']),
    "parameters": (7, [f'megalowbit.recipe={{"base": "nvfp4", {MERGED}}}']),
    "splits": (6, [f'megalowbit.recipe={{"base": "nvfp4", {SPLIT}}}']),
}


@pytest.mark.parametrize("name", slow_except(["fp16"], CASES))
def test_a_rollback_equals_a_resume_at_a_later_data_position(build_job, resolve, tmp_path, name):
    bad, overrides = CASES[name]
    overrides = [*overrides, *EVERY, AT_ONCE]
    job = build_job(*overrides)
    spoil(job, {bad})
    run(job)
    other = tmp_path / "other"
    checkpoint = "checkpoints/step-00000004"
    shutil.copytree(tmp_path / "run" / checkpoint, other / checkpoint)
    fresh = assemble(resolve(*overrides), ProcessIdentity(), RunFolder(other))
    assert fresh.resume()
    fresh.loader.position = bad * fresh.loader.samples_per_batch * fresh.accumulation_steps
    run(fresh, is_resume=True)
    mine, theirs = rows(tmp_path / "run"), rows(other)
    assert [row["step"] for row in mine] == list(range(1, 10))
    assert [row.get("rollbacks") for row in mine] == [None] * 4 + [1] * 5
    assert facts(mine[4:]) == facts(theirs)
    assert job.loader.position == fresh.loader.position
    assert_same_weights(job, fresh)


def test_a_rollback_is_logged_and_recorded(build_job, tmp_path, capsys):
    job = build_job(*EVERY, AT_ONCE, "megalowbit.telemetry.layers_every=1")
    spoil(job, {7})
    run(job)
    reason = "step 7: the loss of the step was not finite (the last one is nan)"
    printed = capsys.readouterr().out
    line = (
        f"rolled back after step 7 to step 4 ({reason}): training continues with new batches; rollback 1 of 3"
    )
    assert line in printed
    assert "rollbacks 1: after step 7 to step 4" in printed.partition("Summary")[2]
    assert printed.count("done: step 9/9") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rollbacks"] == [{"after_step": 7, "to_step": 4, "reason": reason}]
    assert (summary["steps"], summary["skipped_steps"]) == (9, 0)
    table = (tmp_path / "run" / "overflow_layers.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in table]
    assert sorted(steps) == steps
    assert set(steps) == set(range(1, 10))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    curve = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == len(curve) == 9
    assert all(math.isfinite(loss) for loss in curve.values())


def test_a_run_without_problems_logs_nothing(build_job, tmp_path, capsys):
    job = build_job("megalowbit.run.steps=3", AT_ONCE)
    run(job)
    assert "roll" not in capsys.readouterr().out
    assert "rollbacks" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "rollbacks" not in rows(tmp_path / "run")[-1]


@pytest.mark.slow
def test_a_kill_after_a_rollback_costs_nothing(build_job, tmp_path):
    overrides = [
        "megalowbit.run.steps=12", "megalowbit.checkpoint.every=4", "megalowbit.checkpoint.keep=2",
        'megalowbit.loss_guard={"nonfinite": "rollback", "patience": 2}',
    ]  # fmt: skip
    bad = {6, 7, 14, 15}  # the second pair is met at steps 11 and 12

    def start():
        job = build_job(*overrides)
        spoil(job, bad)
        return job

    whole = start()
    run(whole)
    expected = facts(rows(tmp_path / "run"))
    assert [each["to_step"] for each in whole.loss_guard.rollbacks] == [4, 8]
    # before the next checkpoint, and after the second rollback
    for step, rollbacks in ((6, 1), (10, 2)):
        shutil.rmtree(tmp_path / "run")
        killed = start()
        kill_at(killed, step, rollbacks=rollbacks)
        assert run(killed) is None
        again = start()
        assert again.resume()
        assert again.step == (8 if step > 8 else 4)
        run(again, is_resume=True)
        assert facts(rows(tmp_path / "run")) == expected
        assert again.loss_guard.rollbacks == whole.loss_guard.rollbacks
        assert_same_weights(again, whole)


def test_a_rollback_skips_damaged_checkpoints_and_those_saved_while_the_loss_was_unstable(
    build_job, tmp_path, caplog, stop_signals
):
    overrides = [*EVERY, 'megalowbit.loss_guard={"nonfinite": "rollback", "patience": 3}']
    job = build_job(*overrides)
    spoil(job, {6, 7})
    run_until_stopped(job, 7)
    assert job.store.steps() == [4, 7]
    for path in (tmp_path / "run" / "checkpoints" / "step-00000004").glob("mp_rank*"):
        path.write_bytes(path.read_bytes()[:-1])
    resumed = build_job(*overrides)
    assert resumed.resume()
    assert resumed.step == 7
    spoil(resumed, {8})  # the third in a row
    with pytest.raises(UserError, match="there is no checkpoint from before step 6 to roll back to"):
        run(resumed, is_resume=True)
    assert "step-00000004.damaged" in caplog.text
    assert resumed.store.steps() == [7]


def test_a_checkpoint_damaged_after_it_was_read_is_detected(build_job, tmp_path, caplog, stop_signals):
    job = build_job(*EVERY, AT_ONCE)
    run_until_stopped(job, 4)
    resumed = build_job(*EVERY, AT_ONCE)
    assert resumed.resume()
    for path in (tmp_path / "run" / "checkpoints" / "step-00000004").glob("mp_rank*"):
        path.write_bytes(path.read_bytes()[:-1])
    spoil(resumed, {6})
    with pytest.raises(UserError, match=r"all 1 checkpoints in .* are damaged"):
        run(resumed, is_resume=True)
    assert "step-00000004.damaged" in caplog.text


def test_saving_on_request_does_not_change_the_run(build_job, tmp_path, stop_signals):
    undisturbed = build_job(*EVERY, AT_ONCE)
    spoil(undisturbed, {7})
    run(undisturbed)
    expected = facts(rows(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    job = build_job(*EVERY, AT_ONCE)
    run_until_stopped(job, 6)
    again = build_job(*EVERY, AT_ONCE)
    assert again.resume()
    assert again.step == 6
    spoil(again, {7})
    run(again, is_resume=True)
    assert again.loss_guard.rollbacks[0]["to_step"] == 4
    assert facts(rows(tmp_path / "run")) == expected
    assert again.store.steps() == [4, 8, 9]  # that of step 6 is of data that were left out


def test_repeated_bad_data_roll_back_further_and_finally_stop_the_run(build_job, tmp_path, capsys):
    job = build_job(
        "megalowbit.run.steps=20", "megalowbit.checkpoint.every=2",
        "megalowbit.checkpoint.keep=null", AT_ONCE,
    )  # fmt: skip
    spoil(job, range(7, 100))
    with pytest.raises(UserError) as error:
        run(job)
    assert [(each["after_step"], each["to_step"]) for each in job.loss_guard.rollbacks] == [
        (7, 6), (7, 4), (5, 2)
    ]  # fmt: skip
    assert str(error.value).startswith(
        "step 3: the loss of the step was not finite (the last one is nan): "
        "megalowbit.loss_guard.max_rollbacks = 3 is reached: raise it, or start a new run"
    )
    assert job.store.steps() == [2]
    assert "stopped: step 3/20" in capsys.readouterr().out


def test_without_a_checkpoint_the_run_stops_and_says_so(build_job):
    job = build_job(AT_ONCE)
    spoil(job, {2})
    with pytest.raises(
        UserError, match=r"^step 2: .* no checkpoint from before step 2 to roll back to; start"
    ):
        run(job)


def test_a_run_may_be_stopped_instead(build_job, tmp_path):
    job = build_job('megalowbit.loss_guard={"nonfinite": "stop", "patience": 2}')
    spoil(job, {3, 4})
    with pytest.raises(
        UserError, match=r"^step 4: the loss of 2 steps in a row was not finite .*: resume wi"
    ):
        run(job)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_while_the_loss_is_unstable_only_the_last_step_is_saved(build_job, capsys):
    overrides = ["megalowbit.checkpoint.every=2", "megalowbit.checkpoint.keep=null"]
    job = build_job(*overrides, 'megalowbit.loss_guard={"nonfinite": "stop"}')
    spoil(job, {3, 4, 6})
    run(job)
    assert job.store.steps() == [2, 6]
    assert "step 4: no checkpoint saved, because the loss is not stable" in capsys.readouterr().out


@pytest.mark.slow
def test_after_a_rise_there_is_an_earlier_checkpoint_however_few_are_kept(build_job, capsys):
    job = build_job(
        "megalowbit.recipe=bf16", "megalowbit.run.steps=70", "megalowbit.checkpoint.every=6",
        "megalowbit.checkpoint.keep=1", "scheduler=null",
        'megalowbit.loss_guard={"spike": "rollback", "window": 32, "spike_deviations": 1000}',
    )  # fmt: skip
    spoil(job, range(45, 70), 1.5)
    run(job)
    (rollback,) = job.loss_guard.rollbacks
    assert "the loss has risen: " in rollback["reason"]
    assert 45 < rollback["after_step"] < 70
    assert 45 - 32 - 2 * 6 < rollback["to_step"] < 45
    assert job.step == 70
    assert len(job.store.steps()) <= 3


@pytest.mark.slow
def test_consecutive_spikes_trigger_a_rollback(build_job, capsys):
    job = build_job(
        "megalowbit.recipe=bf16", "megalowbit.run.steps=44", "megalowbit.checkpoint.every=6",
        'megalowbit.loss_guard={"spike": "rollback", "patience": 2, "window": 32}',
    )  # fmt: skip
    spoil(job, {36, 40, 41}, 5.0)
    run(job)
    printed = capsys.readouterr().out
    assert "step 36: loss " in printed  # a single one is logged, and a checkpoint left out
    assert "step 36: no checkpoint" in printed
    assert [(each["after_step"], each["to_step"]) for each in job.loss_guard.rollbacks] == [(41, 30)]
