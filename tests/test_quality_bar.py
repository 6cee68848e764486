"""What the recipes promise in loss, measured by benchmarks/quality.py: three runs."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from quality_runs import SEEDS, mean_loss

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_nvfp4_and_metis_nvfp4_are_within_half_a_percent_of_bf16(tmp_path):
    arguments = [f"--seed={seed}" for seed in SEEDS] + ["--recipe=nvfp4", "--recipe=metis-nvfp4"]
    subprocess.run(
        [sys.executable, "benchmarks/quality.py", "--out", str(tmp_path), "--no-picture", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    losses = {
        name: [mean_loss(tmp_path / f"{name}-seed-{seed}") for seed in SEEDS]
        for name in ("bf16", "nvfp4", "metis-nvfp4")
    }
    base = statistics.mean(losses["bf16"])
    for name in ("nvfp4", "metis-nvfp4"):  # which of the two is closer, so few runs do not show
        assert statistics.mean(losses[name]) < 1.005 * base, name
