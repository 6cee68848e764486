"""Ctrl-C during a save: the checkpoint is completed first, and no disk error is reported."""

import re
import signal
import time

import pytest
from forked_ranks import Ranks

from launchers import metrics, write_config

pytestmark = pytest.mark.slow

DELAYS = (0.0, 0.02, 0.06)  # seconds after the folder of a checkpoint has appeared


def has_begun(ranks):
    return re.search(r"^ *step +loss ", ranks.logs[0].read_text(), re.MULTILINE)


def incomplete(run):
    folders = run.glob("checkpoints/step-*")
    return [path for path in folders if path.is_dir() and not (path / "manifest.json").exists()]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Ranks, the newest step they have recorded, and the folder, for each delay."""
    folder, found = tmp_path_factory.mktemp("interrupted"), []
    block = {"run": {"steps": 400}, "checkpoint": {"every": 1, "keep": 2, "export_hf": False}}
    config, run = write_config(folder, block=block, zero_optimization={"stage": 1}), folder / "run"
    for delay in DELAYS:
        with Ranks(folder, "--ds-config", config, "--run-dir", run, "--resume", "auto") as ranks:
            ranks.wait_until(lambda: has_begun(ranks) and incomplete(run))
            time.sleep(delay)
            ranks.send(signal.SIGINT, (0, 1))  # as a keyboard does
            assert ranks.wait(), ranks.output()
        found.append(
            (ranks, metrics(run)[-1]["step"], sorted(path.name for path in run.glob("checkpoints/*")))
        )
    return found


@pytest.mark.parametrize("number", range(len(DELAYS)))
def test_an_interrupted_save_is_finished_and_ends_with_130(interrupted, number):
    ranks, step, names = interrupted[number]
    assert ranks.codes == [130, 130], ranks.output()
    assert not ranks.errors, ranks.output()
    assert "free space" not in ranks.output()
    assert "Traceback" not in ranks.output()
    assert names == ["latest", *(f"step-{each:08d}" for each in range(max(1, step - 1), step + 1))]
