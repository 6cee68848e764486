import json
import math
import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.telemetry.sinks.console import Console

SPLIT = 'megalowbit.recipe={"base": "nvfp4", "split_grad_output": {"rank": 2}}'


def record(job, steps, *, is_main=True):
    with Recorder(job, Console(steps, is_main=False), is_main=is_main, is_resume=False) as recorder:
        for _ in range(steps):
            recorder.step(train_step(job)[0])
        recorder.finish()


def test_every_step_is_one_line_and_the_summary_counts_them(build_job, tmp_path):
    record(build_job(), 3)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize(("every", "expected"), [(0, [3]), (2, [2, 3]), (3, [3])])
def test_the_layer_table_is_written_when_asked_and_at_the_end(build_job, tmp_path, every, expected):
    record(build_job(f"megalowbit.telemetry.layers_every={every}"), 3)
    lines = (tmp_path / "run" / "overflow_layers.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["step"] for line in lines}) == expected


def test_the_layer_table_has_curves_and_leaves_the_metrics_alone(build_job, tmp_path):
    record(build_job("megalowbit.telemetry.layers_every=2"), 2)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "overflow_layers.jsonl").read_text().splitlines()
    ]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for row in rows:
        (event,) = events.Scalars(f"overflow/{row['role']}/{row['layer']}/saturation_rate")
        assert (event.step, event.value) == (2, pytest.approx(row["saturation_rate"]))
    assert "overflow/" not in (tmp_path / "run" / "metrics.jsonl").read_text().replace(
        "gradient_overflow/", ""
    )


def test_without_counters_there_is_no_layer_table(build_job, tmp_path):
    record(build_job("megalowbit.telemetry.overflow=false"), 1)
    assert not (tmp_path / "run" / "overflow_layers.jsonl").exists()


def test_other_processes_than_the_main_one_write_nothing(build_job, tmp_path):
    record(build_job(), 2, is_main=False)
    assert not list((tmp_path / "run").iterdir())


def test_warm_and_cold_splits_are_recorded_and_reported(build_job, tmp_path, capsys, caplog):
    job = build_job(SPLIT)
    with Recorder(job, Console(2), is_main=True, is_resume=False) as recorder:
        for _ in range(2):
            recorder.step(train_step(job)[0])
        recorder.finish()
    # 8 layers, micro-batches of two steps with two each
    expected = {"cold": 8, "warm": 3 * 8}
    counts = json.loads((tmp_path / "run" / "summary.json").read_text())["splits"]
    assert {name: count for name, count in counts.items() if count} == expected
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("splits")]
    assert line == "splits    8 cold, 24 warm"
    assert not caplog.records


def test_a_run_without_splits_does_not_report_any(build_job, tmp_path, capsys):
    job = build_job()
    with Recorder(job, Console(1), is_main=True, is_resume=False) as recorder:
        recorder.step(train_step(job)[0])
        recorder.finish()
    assert "splits" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("splits")]


def test_mismatched_directions_cause_one_warning(build_job, caplog):
    job = build_job(SPLIT)
    with Recorder(job, Console(1, is_main=False), is_main=True, is_resume=False) as recorder:
        recorder.step(train_step(job)[0])
        for layer in bit_layers(job.engine.module).values():
            layer.split_states["grad_output"].count("misfit", 150)
        recorder.finish()
    (warning,) = [each for each in caplog.records if each.name == "megalowbit.pretrain.records.recorder"]
    assert (warning.levelname, "1,200" in warning.getMessage()) == ("WARNING", True)
    assert "did not fit the next matrix" in warning.getMessage()


@pytest.mark.parametrize(("last", "expected"), [(60.5, "60.5, and guessing has "), (math.nan, "is nan")])
def test_a_loss_worse_than_guessing_names_the_diagnosis(build_job, caplog, tmp_path, last, expected):
    job = build_job()
    with Recorder(job, Console(1, is_main=False), is_main=True, is_resume=False) as recorder:
        recorder.step(train_step(job)[0])
        job.totals.final_loss = last
        recorder.finish()
    (warning,) = [each for each in caplog.records if each.name == "megalowbit.pretrain.records.recorder"]
    assert expected in warning.getMessage()
    assert f"`megalowbit diagnose {tmp_path / 'run'}` says what came first" in warning.getMessage()


def test_records_are_closed_as_failed_when_training_raises(build_job, tmp_path):
    job = build_job()

    def fail_after_a_step():
        with Recorder(job, Console(2, is_main=False), is_main=True, is_resume=False) as recorder:
            recorder.step(train_step(job)[0])
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fail_after_a_step()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_damaged_record_does_not_affect_the_others(build_job, tmp_path):
    job = build_job()
    record(job, 3)
    table = tmp_path / "run" / "overflow_layers.jsonl"
    table.write_text("[\n")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    job.totals.steps = 2
    with pytest.raises(UserError, match=r"overflow_layers\.jsonl line 1 is damaged"):
        Recorder(job, Console(3, is_main=False), is_main=True, is_resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_full_disk_is_a_one_line_error_that_explains_how_to_continue(build_job, tmp_path):
    job = build_job()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(job, Console(1, is_main=False), is_main=True, is_resume=False) as recorder:
        facts = train_step(job)[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # less than a line
        try:
            message = r"cannot be recorded in .*/run \(File too large\): free space .* from the start with"
            with pytest.raises(UserError, match=message):
                recorder.step(facts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_unwritable_summary_names_the_checkpoint_to_resume_from(build_job, tmp_path):
    job = build_job()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(job, Console(1, is_main=False), is_main=True, is_resume=False) as recorder:
        recorder.step(train_step(job)[0])
        job.save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(UserError, match=r"\(File too large\).* from the checkpoint of step 1 with"):
                recorder.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob(".*.tmp"))
