"""Benchmarks of several layouts: figures of one device, from the tokens and FLOPs of the full model."""

import json

import pytest
from forked_ranks import run_ranks
from quick_cases import slow_except

from launchers import write_config

FLOPS_PER_TOKEN = 6 * (2 * 12 * 32 * 32 + 256 * 32) + 12 * 2 * 32 * 32  # of the tiny GPT-2
LAYOUTS = {
    "one process": ({}, 1, 1),
    "tensor": ({"tensor_parallel": {"autotp_size": 2}}, 1, 2),
    "pipeline": ({"pipeline": {"stages": 2}}, 1, 2),
    "data": ({"zero_optimization": {"stage": 3}}, 2, 2),
}


@pytest.mark.parametrize("layout", slow_except({"one process"}, LAYOUTS))
def test_devices_share_the_flops_of_their_tokens(tmp_path, layout):
    deepspeed, data_ranks, processes = LAYOUTS[layout]
    config = write_config(tmp_path, block={"telemetry": {"peak_tflops": 2.0}}, **deepspeed)
    (tmp_path / "text.txt").unlink()
    arguments = ("--ds-config", config, "--benchmark", "2", "--run-dir", tmp_path / "out")
    done = run_ranks(*arguments, cwd=tmp_path, processes=processes)
    assert done.code == 0, done.output
    found = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert found["tokens_per_step"] == data_ranks * 2 * 2 * 32
    speed = found["tokens_per_step"] / found["seconds_median"]
    assert found["speeds"]["tflops_per_device"] == pytest.approx(FLOPS_PER_TOKEN * speed / processes / 1e12)
    assert found["speeds"]["mfu"] == pytest.approx(FLOPS_PER_TOKEN * speed / processes / 2e12)
    assert done.output.count(" Benchmark ") == 1
