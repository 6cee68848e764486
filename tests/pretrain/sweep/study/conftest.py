"""A tiny study, whose cells are forked."""

import signal
from pathlib import Path

import pytest
from forks import Forked
from studies import write_study

from launchers import environment
from megalowbit.pretrain.sweep.study import execution

ROOT = Path(__file__).parents[4]
STEPS = 8


class ForkedCell(Forked):
    def terminate(self):
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Path of a study of two recipes and two seeds, whose cells are forked."""
    path = write_study(tmp_path, steps=STEPS)
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
