"""The shipped tiny configuration learns: to the loss that the README promises."""

import pytest

from launchers import ROOT, metrics, run

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "gpt2_tiny_fp4.json"


def mean_loss(rows):
    return sum(row["loss"] for row in rows) / len(rows)


def test_the_whole_run_falls_below_the_promised_loss(tmp_path, monkeypatch):
    arguments = ["--ds-config", CONFIG, "--run-dir", tmp_path / "run"]
    monkeypatch.delenv("MEGALOWBIT_CPU_GEMM")  # the run chooses what is faster, as a user's does
    done = run("deepspeed", *arguments, cwd=tmp_path, processes=2, seconds=840)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    assert len(rows) == 700
    assert 5.2 < rows[0]["loss"] < 5.7
    assert mean_loss(rows[-50:]) < 2.6
