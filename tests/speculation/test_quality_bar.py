"""What speculation promises in loss, measured by tools/calibrate_speculation.py: two runs."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from quality_runs import SEEDS, mean_loss

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_speculation_at_its_defaults_costs_at_most_three_thousandths_of_the_loss(tmp_path):
    """With at least 70 % of products in 8 bits or fewer, over the run."""
    config = json.loads((ROOT / "configs" / "gpt2_tiny_quality.json").read_text(encoding="utf-8"))
    config["megalowbit"] |= {"recipe": "speculative-int8", "speculation": {}}
    config["megalowbit"]["model"]["config"] = str(ROOT / "configs" / "models" / "gpt2_tiny.json")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arguments = ["--threshold=15", *(f"--seed={seed}" for seed in SEEDS), "--no-picture"]
    folders = ["--ds-config", str(tmp_path / "config.json"), "--out", str(tmp_path / "runs")]
    subprocess.run(
        [sys.executable, "tools/calibrate_speculation.py", *folders, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    runs = {name: [tmp_path / "runs" / f"{name}-seed-{seed}" for seed in SEEDS] for name in ("bf16", "15-dB")}
    base, loss = (statistics.mean(map(mean_loss, runs[name])) for name in ("bf16", "15-dB"))
    assert loss < 1.003 * base
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in runs["15-dB"]]
    assert min(each["speculation"]["share_8bit_or_less"] for each in summaries) >= 0.7
