"""A tiny study, whose cells are forked."""

import json
import random
import signal
from pathlib import Path

import pytest
from forks import Forked

from launchers import environment, training_text, write_config
from megalowbit.pretrain.sweep.study import execution

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
    words = training_text().split()
    random.Random(0).shuffle(
        words
    )  # lines of this text repeat their phrases; such documents are not held out
    for start in range(0, len(words), 100):
        (tmp_path / "parts" / f"{start:05d}.txt").write_text(" ".join(words[start : start + 100]) + "\n")
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
