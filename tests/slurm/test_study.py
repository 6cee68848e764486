"""A study as a SLURM array: every cell ends, also one that is stopped and queued again."""

import json
import re
import sys
import time

import pytest
from studies import write_study

from cluster import Job
from launchers import ROOT, environment
from runs import SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TOOL = ROOT / "tools" / "study.py"
STEPS = 120


def test_an_array_finishes_its_cells_and_queues_a_stopped_one_again(cluster, tmp_path):
    study, out, settings = write_study(tmp_path, steps=STEPS), tmp_path / "out", tmp_path / "cluster.json"
    (tmp_path / "cache").mkdir(mode=0o700, exist_ok=True)
    env = environment(tmp_path / "cache") | {"PYTHONPATH": str(ROOT)}
    names = ("MEGALOWBIT_CACHE", "TORCH_EXTENSIONS_DIR", "PYTHONPATH", "WANDB_MODE")
    settings.write_text(
        json.dumps(
            {
                "nodes": 1,
                "gpus_per_node": 0,
                "cpus_per_task": 1,
                "time": "00:30:00",
                "environment": {name: env[name] for name in names if name in env},
            }
        )
    )
    tool = (sys.executable, TOOL, study, "--out", out)
    cluster.run(*tool, "--slurm", settings, "--jobs", 2, "--seed", 1, **env)
    array = cluster.submit(out / "slurm" / "study.sbatch", cwd=tmp_path)
    task, log = Job(cluster, f"{array.id}_2"), out / "slurm" / f"job-{array.id}-2.log"
    deadline = time.monotonic() + SECONDS
    while not (log.exists() and re.search(r"(?m)^ *[4-9]/", log.read_text())):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else cluster.logs()
        time.sleep(0.1)
    task.signal_steps("USR1")  # as SLURM does before the time limit
    for number in (1, 2):
        state = Job(cluster, f"{array.id}_{number}").wait(SECONDS)
        assert state == "COMPLETED", log.read_text()
    assert task.restarts == 1
    cluster.run(*tool, "--report", **env)
    cells = json.loads((out / "study.json").read_text())["cells"]
    assert set(cells) == {f"tiny,parts,{STEPS},{recipe},1" for recipe in ("bf16", "nvfp4")}
    for cell in cells.values():
        means = cell["losses"]["means"]
        assert cell["losses"]["steps"] == STEPS
        assert means[-1] < means[0]
