"""The report on stressed cells: planted records with known breaks and warnings, and a real study."""

import json
from pathlib import Path

import pytest
from programs import call_main
from studies import RESULT, fork_cells, write_study

from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import diagnosis_of
from megalowbit.pretrain.sweep.instability.report import write_instability
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.results import LossMeans
from megalowbit.pretrain.sweep.study.study_file import read_study

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "launch" / "pretrain.py"
STEPS = 100
SNR = "quantization/input/snr_db"


@pytest.fixture
def stressed(tmp_path):
    """A study of two recipes with one stress, and the cells of its first seed by size and recipe."""
    path = write_study(tmp_path, steps=STEPS)
    raw = json.loads(path.read_text())
    raw["sizes"] += [{"name": "hot", "stress_of": "tiny", "lr_factor": 4}]
    raw["instability"] = {"window": 5, "rise": 0.5, "gap": 0.25}
    path.write_text(json.dumps(raw))
    study = read_study(path)
    return study, cells_of(study, tmp_path / "out", PROGRAM), tmp_path / "out"


def write(cell, *, losses, **columns):
    """A finished cell with these records; a column is a function of the step, ... if it is not recorded."""
    cell.write("result.json", {**RESULT, "losses": losses})
    lines = []
    for step, loss in enumerate(losses, start=1):
        values = {name: value(step) for name, value in columns.items()}
        row = {"step": step, "loss": loss, "skipped_steps": 0}
        lines.append(
            json.dumps({**row, **{name: value for name, value in values.items() if value is not ...}})
        )
    (cell.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def falling(step):
    return 5 - 0.01 * step


def diagnosis(run):
    """As if a diagnosis had found the stressed FP4 runs."""
    if ",nvfp4," in run.name and run.name.startswith("hot"):
        return {"state": "troubled", "first": "learning rate", "step": 70}
    return {"state": "healthy", "first": None, "step": None}


def report(stressed):
    study, cells, out = stressed
    out.mkdir(exist_ok=True)
    text = write_instability(study, cells, out, diagnosis)
    data = json.loads((out / "instability.json").read_text())
    return text, data, {run["cell"]: run for run in data["runs"]}


def test_a_planted_break_and_its_warnings_are_found_and_nothing_else(stressed):
    _, cells, _ = stressed
    of = {(cell.size.name, cell.label): cell for cell in cells if cell.seed == 1}
    calm = [falling(step) for step in range(1, STEPS + 1)]
    norm = {"grad_norm": lambda step: 1.0 + 0.01 * (step % 7)}
    snr = {SNR: lambda step: 20.0 if step % 10 == 0 else ...}
    write(of["tiny", "bf16"], losses=calm, **norm)
    write(of["tiny", "nvfp4"], losses=calm, **norm, **snr)
    write(of["hot", "bf16"], losses=calm, **norm)
    # weaker signal from step 35 on, a larger norm from step 61 on, a loss that is 1 higher from step 80 on
    write(
        of["hot", "nvfp4"],
        losses=[loss + (step >= 80) for step, loss in enumerate(calm, start=1)],
        grad_norm=lambda step: 3.0 if step > 60 else norm["grad_norm"](step),
        **{SNR: lambda step: (18.0 if step >= 35 else 20.0) if step % 10 == 0 else ...},
    )
    text, data, runs = report(stressed)
    assert len(runs) == 4
    broken = runs["hot,parts,100,nvfp4,1"]
    # means of five: the rise is .6 - .03 with three raised losses; the gap is .4 with two, and holds until 86
    assert [(each["kind"], each["step"]) for each in broken["breaks"]] == [("rise", 82), ("gap", 86)]
    assert broken["gap"] == pytest.approx(1)
    assert broken["cost"] == pytest.approx(1)
    assert broken["is_broken_at_end"]
    assert broken["stress"] == "hot"
    found = [(each["metric"], each["step"], each["lead"]) for each in broken["alarms"]]
    assert found == [(SNR, 50, 32), ("grad_norm", 80, 2), ("loss", 100, -18)]
    for name, run in runs.items():
        if run is not broken:
            assert run["breaks"] == run["alarms"] == [], name
    records = {each["metric"]: each for each in data["metrics"]}
    assert records[SNR]["leads"] == [32]
    assert (records[SNR]["warned"], records[SNR]["broken"], records[SNR]["intact"]) == (1, 1, 0)
    assert (records["loss"]["warned"], records["loss"]["broken"], records["loss"]["intact"]) == (0, 1, 1)
    assert records["grad_norm"]["unstressed"] == 0  # a single one cannot be left out
    assert data["limits"]["tiny"]["nvfp4"][SNR]["alarm"] == "below"
    assert set(data["limits"]["tiny"]["nvfp4"][SNR]["values"]) == {19.5}
    (row,) = [line for line in text.splitlines() if "| hot" in line and "nvfp4" in line]
    assert "82 (rise)" in row
    assert f"{SNR} at 50 (32 before), grad_norm at 80 (2 before) |" in row
    assert "Runs that broke under hot: nvfp4 1 of 1 (from step 82)." in text
    assert broken["diagnosis"] == {"state": "troubled", "first": "learning rate", "step": 70}
    assert "| learning rate (70) |" in row
    assert "something went wrong in 1 of 1 runs that broke, and in 0 of 3 others." in text


def test_alarms_of_a_run_that_does_not_break_are_counted_apart(stressed):
    _, cells, _ = stressed
    calm = [falling(step) for step in range(1, STEPS + 1)]
    for cell in cells:
        is_hot = cell.size.name == "hot" and cell.label == "nvfp4"
        write(cell, losses=calm, grad_norm=lambda step, is_hot=is_hot: 2.0 if is_hot else 1.0)
    text, data, runs = report(stressed)
    record = next(each for each in data["metrics"] if each["metric"] == "grad_norm")
    assert (record["broken"], record["intact"], record["alarms_without_break"]) == (0, 4, 2)
    assert (record["unstressed"], record["false_alarms"]) == (4, 0)
    assert [each["lead"] for each in runs["hot,parts,100,nvfp4,2"]["alarms"]] == [None]
    assert "something went wrong in 0 of 0 runs that broke, and in 2 of 8 others." in text


def test_an_unstressed_run_that_breaks_is_reported_and_gives_no_limits(stressed):
    _, cells, _ = stressed
    calm = [falling(step) for step in range(1, STEPS + 1)]
    for cell in cells:
        if cell.seed == 1:
            is_lost = (cell.size.name, cell.label) == ("tiny", "nvfp4")
            write(cell, losses=[*calm[:50], *[None] * 50] if is_lost else calm)
    text, data, runs = report(stressed)
    assert runs["tiny,parts,100,nvfp4,1"]["breaks"][0] == {"kind": "not finite", "step": 51, "distance": None}
    assert runs["hot,parts,100,nvfp4,1"]["alarms"] is None
    assert list(data["limits"]["tiny"]) == ["bf16"]
    assert "no unstressed run" in text


def test_kept_results_are_counted_because_they_have_no_single_steps(stressed):
    _, cells, _ = stressed
    calm = [falling(step) for step in range(1, STEPS + 1)]
    for cell in cells:
        write(cell, losses=calm)
    kept = next(cell for cell in cells if cell.name == "hot,parts,100,nvfp4,2")
    kept.write("result.json", {**RESULT, "losses": LossMeans.of(calm, 5).model_dump()})
    text, _, runs = report(stressed)
    assert set(runs) == {cell.name for cell in cells} - {kept.name}
    assert "Left out, because kept results have no losses of single steps: 1 of the cells." in text


def test_a_study_without_finished_stresses_says_so(stressed):
    text, data, _ = report(stressed)
    assert text == "No run under stress is finished."
    assert data["runs"] == []


@pytest.mark.slow
def test_a_real_study_reports_a_learning_rate_that_breaks_a_run(tmp_path, capsys, monkeypatch):
    path = write_study(tmp_path, steps=60)
    raw = json.loads(path.read_text())
    raw["sizes"] += [{"name": "hot", "stress_of": "tiny", "lr_factor": 300}]
    raw["set"] |= {
        "megalowbit.telemetry.overflow": True,
        "megalowbit.telemetry.count_every": 5,
        "megalowbit.checkpoint.every": 0,
    }
    raw |= {"seeds": [1], "instability": {"window": 5, "bucket": 5}}
    path.write_text(json.dumps(raw))
    fork_cells(tmp_path, monkeypatch)
    done = call_main("tools/study.py", path, "--out", tmp_path / "out", capsys=capsys)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out" / "instability.json").read_text())
    runs = {(run["stress"], run["recipe"]): run for run in data["runs"]}
    assert len(runs) == 4
    for recipe in ("bf16", "nvfp4"):
        assert runs[None, recipe]["breaks"] == []
        hot = runs["hot", recipe]
        rows = [
            json.loads(line) for line in (tmp_path / "out" / "cells" / hot["cell"] / "metrics.jsonl").open()
        ]
        means = [sum(row["loss"] for row in rows[end - 5 : end]) / 5 for end in range(5, len(rows) + 1)]
        rises = [end for end in range(len(means)) if means[end] - min(means[: end + 1]) > 0.25]
        assert next(each["step"] for each in hot["breaks"] if each["kind"] == "rise") == rises[0] + 5
        verdict = diagnosis_of(read_run(tmp_path / "out" / "cells" / hot["cell"]))
        assert hot["diagnosis"]["state"] == verdict.state == "troubled"
        first = (verdict.first.name, verdict.first.step)
        assert (hot["diagnosis"]["first"], hot["diagnosis"]["step"]) == first
    assert SNR in runs["hot", "nvfp4"]["metrics"]
    assert "**Early warning by metric**" in done.stdout
