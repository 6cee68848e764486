"""A study whose runs take seconds, and a fixture whose cells are forked."""

import json
import random
import signal
from pathlib import Path

import pytest
from forks import Forked

from launchers import ROOT, environment, training_text, write_config
from megalowbit.pretrain.sweep.study import execution

STEPS = 8
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
    env = environment(folder / "cache") | {"PYTHONPATH": str(ROOT)}

    def starter(tool, study_file):
        def start(cell, log):
            arguments = (study_file, "--out", cell.folder, "--cell", cell.name)
            return ForkedCell(tool, *arguments, output=log, env=env)

        return start

    monkeypatch.setattr(execution, "starter", starter)
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
