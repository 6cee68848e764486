"""Studies from the command line: real cells, killed ones, repeated ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import Forked, run_script
from programs import call_main

from launchers import environment, metrics, training_text, write_config
from megalowbit.errors import EXIT_TRANSIENT, UserError
from megalowbit.pretrain.sweep.study import execution
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.execution import execute, raise_failures
from megalowbit.pretrain.sweep.study.study_file import read_study

TOOL = "tools/study.py"
ROOT = Path(__file__).parents[4]
STEPS = 8


class ForkedCell(Forked):
    def terminate(self):
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Path of a study of two recipes and two seeds, whose cells are forked."""
    write_config(tmp_path)
    (tmp_path / "parts").mkdir()
    lines = training_text().splitlines(keepends=True)
    for start in range(0, len(lines), 50):
        (tmp_path / "parts" / f"{start:04d}.txt").write_text("".join(lines[start : start + 50]))
    path = tmp_path / "study.json"
    path.write_text(
        json.dumps(
            {
                "base": "tiny.json",
                "set": {
                    "megalowbit.checkpoint.every": 2,
                    "megalowbit.data.cache_dir": str(tmp_path / "cache"),
                },
                "sizes": [{"name": "tiny"}],
                "texts": [{"name": "parts", "source": "file", "path": "parts"}],
                "seeds": [1, 2],
                "steps": [STEPS],
                "recipes": [{"name": name, "set": {"megalowbit.recipe": name}} for name in ("bf16", "nvfp4")],
                "baseline": "bf16",
                "window": 2,
                "marks": [4],
                "heldout_bytes": 3000,
            }
        )
    )
    env = environment(tmp_path / "cache") | {"PYTHONPATH": str(ROOT)}

    def starter(tool, study_file):
        def start(cell, log):
            arguments = (study_file, "--out", cell.folder, "--cell", cell.name)
            return ForkedCell(tool, *arguments, output=log, env=env)

        return start

    monkeypatch.setattr(execution, "starter", starter)
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


def result(out, name):
    return json.loads((out / "cells" / name / "result.json").read_text())


@pytest.mark.slow
def test_a_study_runs_its_cells_once_and_one_is_reproduced_from_its_results(study, tmp_path, capsys):
    out = tmp_path / "out"
    done = call_main(TOOL, study, "--out", out, "--jobs", 2, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert "4 cells, 0 finished" in done.stdout
    data = json.loads((out / "study.json").read_text())
    assert data["unfinished"] == 0
    (group,) = data["groups"]
    losses = {name: result(out, name)["losses"] for name in data["cells"]}
    assert {len(each) for each in losses.values()} == {STEPS}
    gaps = [
        sum(losses[f"tiny,parts,8,nvfp4,{seed}"][-2:]) / 2 - sum(losses[f"tiny,parts,8,bf16,{seed}"][-2:]) / 2
        for seed in (1, 2)
    ]
    (row,) = group["rows"]
    assert row["gaps"]["8"]["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-12)
    assert row["gaps"]["8"]["num_pairs"] == 2
    for seed in (1, 2):
        heldout = result(out, f"tiny,parts,8,bf16,{seed}")["heldout"]
        assert heldout["own"] == heldout["bf16"]
        heldout = result(out, f"tiny,parts,8,nvfp4,{seed}")["heldout"]
        assert heldout["own"] != heldout["bf16"]
    assert (out / "study.html").read_text().count("<polyline") == 1
    assert not list(out.glob("cells/*/checkpoints"))
    times = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    again = call_main(TOOL, study, "--out", out, capsys=capsys)
    assert "4 cells, 4 finished" in again.stdout
    assert times == {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}

    repeated = tmp_path / "repeated"
    study.unlink()  # the results are enough
    arguments = ("--reproduce", out / "study.json", "tiny,parts,8,nvfp4,2", "--out", repeated)
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("tiny,parts,8,nvfp4,2 is reproduced exactly\n")
    data["cells"]["tiny,parts,8,nvfp4,2"]["losses"]["8"] += 0.25
    (out / "other.json").write_text(json.dumps(data))
    done = call_main(TOOL, *arguments[:1], out / "other.json", *arguments[2:], capsys=capsys)
    assert done.returncode == 1
    assert "differs by up to 2.50e-01 nats from that of commit" in done.stdout
    assert (
        call_main(
            TOOL, "--within", 0.3, *arguments[:1], out / "other.json", *arguments[2:], capsys=capsys
        ).returncode
        == 0
    )


@pytest.mark.slow
def test_a_killed_cell_continues_to_the_same_result_and_other_settings_are_refused(study, tmp_path, capsys):
    out, name = tmp_path / "out", "tiny,parts,8,nvfp4,1"
    few = ("--recipe", "nvfp4", "--seed", 1)
    assert call_main(TOOL, study, "--out", out, *few, capsys=capsys).returncode == 0
    whole = result(out, name)

    killed = tmp_path / "killed"
    (killed / "logs").mkdir(parents=True)
    cells = {cell.name: cell for cell in cells_of(read_study(study), killed, ROOT / "launch" / "pretrain.py")}
    process = execution.starter(ROOT / TOOL, study)(cells[name], killed / "logs" / "first.log")
    while not (seen := metrics(cells[name].path)) or seen[-1]["step"] < 5:
        assert process.poll() is None, (killed / "logs" / "first.log").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait()
    if not (cells[name].path / "result.json").exists():  # else it was faster than this test
        done = call_main(TOOL, study, "--out", killed, *few, capsys=capsys)
        assert done.returncode == 0, done.stderr
    again = result(killed, name)
    assert again["losses"] == whole["losses"]
    assert again["heldout"] == whole["heldout"]
    assert again["tokens"] == whole["tokens"]

    changed = json.loads(study.read_text())
    changed["set"]["gradient_clipping"] = 0.5
    study.write_text(json.dumps(changed))
    done = call_main(TOOL, study, "--out", out, *few, capsys=capsys)
    assert done.returncode == 2
    assert "was run with other settings: config.gradient_clipping = 0.5 (was 1.0)" in done.stderr
    assert result(out, name) == whole


def test_a_cell_that_another_process_runs_is_left_to_it(study, tmp_path):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    (tmp_path / "out" / "locks").mkdir(parents=True)
    lock = tmp_path / "out" / "locks" / cell.name
    holder = subprocess.Popen(["flock", str(lock), "sleep", "60"])
    try:
        while subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 0:
            time.sleep(0.01)
        done = run_script(ROOT / TOOL, study, "--out", tmp_path / "out", "--cell", cell.name)
    finally:
        holder.kill()
        holder.wait()
    assert done.returncode == EXIT_TRANSIENT
    assert done.stderr == f"error: {cell.name} is run by another process: wait for it\n"
    assert not cell.path.exists()


def cells_with_code(study, tmp_path, codes):
    """Cells, and a starter of real processes that print a line and exit with these codes."""
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)

    def start(cell, log):
        code = f"print('reading'); print('error: no such thing'); raise SystemExit({codes[cell.name]})"
        with log.open("w") as file:
            return subprocess.Popen([sys.executable, "-c", code], stdout=file)

    return cells, start


def test_a_cell_that_fails_does_not_end_the_others(study, tmp_path, capsys):
    names = [cell.name for cell in cells_of(read_study(study), tmp_path, ROOT)]
    cells, start = cells_with_code(study, tmp_path, dict(zip(names, (2, 0, EXIT_TRANSIENT, 0), strict=True)))
    outcome = execute(cells, jobs=2, start=start)
    assert outcome.finished == [names[1], names[3]] or outcome.finished == [names[3], names[1]]
    assert outcome.failed == {names[0]: "no such thing"}
    assert outcome.elsewhere == [names[2]]
    assert f"{names[2]}: run by another command" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"1 cells have failed: {names[0]}: no such thing"):
        raise_failures(outcome)


def test_a_stop_signal_ends_all_cells(study, tmp_path):
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)
    started = []

    def start(cell, log):
        started.append(subprocess.Popen(["sleep", "60"]))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        execute(cells, jobs=2, start=start)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is before


MISTAKES = [
    (
        ("study.json", "--recipe", "nvfp5"),
        "unknown --recipe 'nvfp5': did you mean 'nvfp4'? known: bf16, nvfp4",
    ),
    (("study.json", "--jobs", "0"), "--jobs 0 must be at least 1"),
    ((), "name either a STUDY.json or --reproduce RESULTS.json CELL"),
    (("none.json",), "cannot read none.json"),
    (
        ("--reproduce", "study.json", "x"),
        "study.json has no 'study': name a study.json that tools/study.py has written",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line_and_runs_nothing(study, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_list_names_cells_and_which_are_finished(study, tmp_path, capsys):
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)
    cells[0].write("result.json", {})
    done = call_main(TOOL, study, "--out", tmp_path / "out", "--list", "--seed", 1, capsys=capsys)
    assert done.stdout.splitlines() == ["finished  tiny,parts,8,bf16,1", "-         tiny,parts,8,nvfp4,1"]
