"""What recipes and speculation promise in loss after 500 steps: three runs, one in bf16.

Gaps at the end of longer training, over seeds and texts, are in docs/experiments/loss.md.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from quality_runs import SEEDS, mean_loss

from megalowbit.pretrain.sweep.runs import LEAN, Run, execute, folder_name

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "gpt2_tiny_quality.json"
LAYERS = 2  # half the time of the shipped model's; in fp32, nvfp4 was +.22 % from bf16, speculation -.03 %

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of all runs: both tests use one run in bf16."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's configuration, the same file for all runs."""
    shipped = json.loads((ROOT / "configs" / "models" / "gpt2_tiny.json").read_text(encoding="utf-8"))
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(shipped | {"n_layer": LAYERS}), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def faster_products(monkeypatch):
    """Runs multiply in the dtype that is faster here, as a user's do."""
    monkeypatch.delenv("MEGALOWBIT_CPU_GEMM")


def write_config(folder, model, **settings):
    """The configuration under its own name, which a run in bf16 must share as well to be used again."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["megalowbit"] |= settings
    config["megalowbit"]["model"]["config"] = str(model)
    path = folder / CONFIG.name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def losses(folder, name):
    return statistics.mean(mean_loss(folder / f"{name}-seed-{seed}") for seed in SEEDS)


def test_nvfp4_is_within_half_a_percent_of_bf16(folder, model, tmp_path):
    config = write_config(tmp_path, model)
    runs = [
        Run(
            label=name,
            seed=seed,
            folder=folder / folder_name(name, seed),
            config=config,
            overrides=(*LEAN, f"megalowbit.run.seed={seed}", f"megalowbit.recipe={name}"),
            program=ROOT / "launch" / "pretrain.py",
        )
        for name in ("bf16", "nvfp4")
        for seed in SEEDS
    ]
    execute([run for run in runs if not run.is_complete()], jobs=2)
    assert losses(folder, "nvfp4") < 1.005 * losses(folder, "bf16")


def test_speculation_at_its_defaults_costs_at_most_three_thousandths_of_the_loss(folder, model, tmp_path):
    """With at least 70 % of products in 8 bits or fewer, over the run."""
    config = write_config(tmp_path, model, recipe="speculative-int8", speculation={})
    seeds = [f"--seed={seed}" for seed in SEEDS]
    tool = [sys.executable, "tools/calibrate_speculation.py", "--ds-config", config, "--out", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*tool, "--threshold=15", "--no-picture", *seeds], cwd=ROOT, env=environment, check=True)
    assert losses(folder, "15-dB") < 1.003 * losses(folder, "bf16")
    for seed in SEEDS:
        summary = json.loads((folder / f"15-dB-seed-{seed}" / "summary.json").read_text())
        assert summary["speculation"]["share_8bit_or_less"] >= 0.7
