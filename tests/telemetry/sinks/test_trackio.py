"""trackio for real, in an environment of its own: its packages and the project's do not fit together."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from environments import environment_with

from megalowbit.errors import UserError
from megalowbit.telemetry.settings import TrackioSettings
from megalowbit.telemetry.sinks.trackio import TrackioSink

ROOT = Path(__file__).parents[3]
TRACKIO = "trackio==0.43.0"
SETTINGS = {"enabled": True, "project": "tiny", "group": "night"}
BEGIN = f"""
import math, sys, warnings
from pathlib import Path
from megalowbit.telemetry.media import Histogram, TextSample
from megalowbit.telemetry.settings import TrackioSettings
from megalowbit.telemetry.sinks.trackio import TrackioSink
run = Path("run")
sink = TrackioSink(run, TrackioSettings(**{SETTINGS}), run_name="gpt2", config={{"recipe": "nvfp4"}})
assert sink.is_on
"""
FIRST_PART = """
for step in (1, 2, 3):
    sink.write(step, {"loss": 6 / step, "lr": None if step == 2 else 0.5, "grad_norm": math.inf})
counts = Histogram(name="max/h.0", edges=(0.0, 1.0, 2.0), counts=(3, 4))
sink.write_media(3, [counts, TextSample(number=1, prompt="Once", text=" upon")])
Path("report.html").write_text("<p>the report</p>")
sink.write_files([Path("report.html")])
sink.close(0, {"final_loss": 2.0, "best_loss": None})
"""
RESUMED = """
for step in (3, 4):
    sink.write(step, {"loss": 60 / step})
sink.close(1)
"""
BROKEN = """
sink._run._next_step = None  # as after a change of trackio
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sink.close(0, {"final_loss": 2.0})
print([str(each.message) for each in caught if each.category is RuntimeWarning])
"""


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    remedy = r"pip install 'megalowbit\[trackio\]', or set megalowbit.trackio.enabled=false"
    with pytest.raises(UserError, match=remedy):
        TrackioSink(tmp_path, TrackioSettings(enabled=True))
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return environment_with(tmp_path_factory.mktemp("trackio"), TRACKIO) / "bin" / "python"


def run_in(python, folder, code):
    environ = {
        **os.environ,
        "TRACKIO_DIR": str(folder / "db"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [python, "-c", BEGIN + code], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done


def rows_of(folder, query):
    with closing(sqlite3.connect(folder / "db" / "tiny.db")) as database:
        return database.execute(query).fetchall()


@pytest.mark.slow
def test_runs_are_in_the_local_database(python, tmp_path):
    done = run_in(python, tmp_path, FIRST_PART)
    assert (done.stdout, done.stderr) == ("", ""), "trackio talks into the console"
    run_id = (tmp_path / "run" / "trackio" / "run_id").read_text().strip()
    metrics = rows_of(tmp_path, "select run_name, step, metrics from metrics order by id")
    assert {name for name, _, _ in metrics} == {f"gpt2-{run_id}"}
    steps = [(step, json.loads(row)) for _, step, row in metrics]
    assert steps[:3] == [
        (1, {"train/loss": 6.0, "train/lr": 0.5, "train/grad_norm": "Infinity"}),
        (2, {"train/loss": 3.0, "train/grad_norm": "Infinity"}),
        (3, {"train/loss": 2.0, "train/lr": 0.5, "train/grad_norm": "Infinity"}),
    ]
    step, media = steps[3]
    histogram = media["histograms/max/h.0"]
    assert (step, histogram["bins"], histogram["values"]) == (3, [0.0, 1.0, 2.0], [3, 4])
    assert media["samples"]["_value"] == [{"number": 1, "prompt": "Once", "text": " upon"}]
    assert steps[4] == (3, {"summary/final_loss": 2.0, "summary/exit_code": 0})
    [(config,)] = rows_of(tmp_path, "select config from configs")
    assert (json.loads(config)["recipe"], json.loads(config)["_Group"]) == ("nvfp4", "night")
    assert rows_of(tmp_path, "select name, type from artifacts") == [(rows_of_artifact(tmp_path), "report")]

    run_in(python, tmp_path, RESUMED)
    metrics = rows_of(tmp_path, "select run_name, step, metrics from metrics order by id")[5:]
    assert [(name, step, json.loads(row)) for name, step, row in metrics] == [
        (f"gpt2-{run_id}", 4, {"train/loss": 15.0}),  # step 3 was logged before
        (f"gpt2-{run_id}", 4, {"summary/exit_code": 1}),
    ]


def rows_of_artifact(folder):
    """The artifact's name, whose one version has the file."""
    [(name, manifest)] = rows_of(
        folder,
        "select artifacts.name, manifest from artifacts join artifact_versions on artifacts.id = artifact_id",
    )
    assert [entry["path"] for entry in json.loads(manifest)] == ["report.html"]
    return name


@pytest.mark.slow
def test_a_failure_warns_once_and_training_goes_on(python, tmp_path):
    done = run_in(python, tmp_path, BROKEN)
    assert "trackio failed and is off for the rest of this run" in done.stdout
    assert done.stdout.count("metrics.jsonl has everything") == 1
