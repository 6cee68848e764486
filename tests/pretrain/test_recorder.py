import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.recorder import Recorder
from megalowbit.telemetry.console import Console


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
