"""A study whose runs take seconds, and a fixture whose cells are forked."""

import json
import random
import signal
from pathlib import Path

import pytest
from forks import Forked
from programs import call_main

from launchers import ROOT, environment, training_text, write_config
from megalowbit.pretrain.sweep.study import execution
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.results import made_with
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

STEPS = 8
NAMES = [f"tiny,parts,8,{recipe},{seed}" for seed in (1, 2) for recipe in ("bf16", "nvfp4")]
# of a finished cell that has recorded nothing
RESULT = {
    "settings": {"cell": {}, "config": {}, "model": None, "text": {}},
    "losses": [],
    "tokens": 0,
    "skipped_steps": 0,
    "diverged_at": None,
    "heldout": None,
    "cost": {"wall_seconds": 4.0, "cpu_seconds": 2.0, "steps": 0, "seconds_of_steps": 3.0, "threads": 1},
    "made_with": {
        **{"commit": "abc", "python": "3.11.0", "torch": "2.9.0+cpu", "transformers": "5.0.0"},
        **{"machine": "x86_64", "processor": "one", "command": ["study.py", "gap.json", "--cell", "name"]},
    },
}


def write_study(folder: Path, steps: int) -> Path:
    """Write a study of two recipes and two seeds with its configuration and its text, and return its path."""
    write_config(folder)
    (folder / "parts").mkdir()
    words = training_text().split()
    random.Random(0).shuffle(words)  # a document that repeats the phrases of another is not held out
    for start in range(0, len(words), 100):
        (folder / "parts" / f"{start:05d}.txt").write_text(" ".join(words[start : start + 100]) + "\n")
    study = {
        "base": "tiny.json",
        "set": {"megalowbit.checkpoint.every": 2, "megalowbit.data.cache_dir": str(folder / "cache")},
        "sizes": [{"name": "tiny"}],
        "texts": [{"name": "parts", "source": "file", "path": "parts"}],
        "seeds": [1, 2],
        "steps": [steps],
        "recipes": [{"name": name, "set": {"megalowbit.recipe": name}} for name in ("bf16", "nvfp4")],
        "baseline": "bf16",
        "window": 2,
        "marks": [4],
        "heldout_bytes": 3000,
    }
    path = folder / "study.json"
    path.write_text(json.dumps(study))
    return path


class ForkedCell(Forked):
    def terminate(self):
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Path of a study of two recipes and two seeds, whose cells are forked."""
    fork_cells(tmp_path, monkeypatch)
    return write_study(tmp_path, steps=STEPS)


def fork_cells(folder, monkeypatch):
    """Let studies of this test fork their cells, with caches in this folder."""

    def starter(tool, study_file):
        def start(cell, log):
            env = environment(folder / "cache") | {"PYTHONPATH": str(ROOT)}
            arguments = (study_file, "--out", cell.folder, "--cell", cell.name)
            return ForkedCell(tool, *arguments, output=log, env=env)

        return start

    monkeypatch.setattr(execution, "starter", starter)
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def finish(study_file, out, *names, **origin):
    """Write made-up results of cells, as a run would."""
    study = read_study(study_file)
    cells = [cell for cell in cells_of(study, out, ROOT / "launch" / "pretrain.py") if cell.name in names]
    (facts,) = (write_text(text, cells[0].text_folder, heldout_bytes=3000) for text in study.texts)
    for cell in cells:
        gap = {"bf16": 0.0, "nvfp4": 0.02}[cell.label]
        settings = cell.settings(facts)
        cell.write("cell.json", settings)
        result = {
            **RESULT,
            "settings": settings,
            "losses": [5 / step + cell.seed + gap * step / 7 for step in range(1, 9)],
            "tokens": 1024,
            "heldout": {"bf16": 2.0 + gap, "own": 2.0 + 2 * gap, "tokens": 9},
            "cost": {**RESULT["cost"], "steps": 8, "cpu_seconds": cell.seed * (2.0 if gap else 1.0)},
            "made_with": {**made_with(ROOT), **origin},
        }
        cell.write("result.json", result)
    return cells


def report(study, out, capsys, *more):
    """Write the report of what is finished: its `study.json`, and how the command has ended."""
    done = call_main("tools/study.py", study, "--out", out, "--report", *more, capsys=capsys)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "study.json").read_text()), done
