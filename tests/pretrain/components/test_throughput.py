"""TFLOP/s and MFU of a run; the model is the tiny GPT-2 of `write_config`."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.pretrain.components.throughput import Throughput
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain

# 2 blocks of width 32, vocabulary 256, sequences of 32 tokens: q, k and v, output, MLP; then the head
BLOCK_WEIGHTS = 32 * 96 + 32 * 32 + 32 * 128 + 128 * 32
ATTENTION = 12 * 2 * 32 * 32
COUNTED = 6 * (2 * BLOCK_WEIGHTS + 256 * 32) + ATTENTION
BIASES_AND_NORMS = 2 * (96 + 32 + 128 + 32 + 4 * 32) + 2 * 32
PALM = 6 * (2 * BLOCK_WEIGHTS + 256 * 32 + 64 * 32 + BIASES_AND_NORMS) + ATTENTION
PEAK = "megalowbit.telemetry.peak_tflops=0.5"


def test_columns_of_a_step_follow_from_its_speed(build_job):
    job = build_job(PEAK)
    facts = train_step(job).facts
    speed = facts["tokens_per_second"]
    assert facts["tflops_per_device"] == pytest.approx(COUNTED * speed / 1e12, rel=1e-12)
    assert facts["mfu"] == pytest.approx(COUNTED * speed / 0.5e12, rel=1e-12)
    assert facts["mfu_palm"] == pytest.approx(PALM * speed / 0.5e12, rel=1e-12)


def test_mfu_is_that_of_the_products_that_torch_counts_in_the_model_of_the_run(build_job, tmp_path):
    facts = train_step(build_job(PEAK)).facts
    config = GPT2Config.from_json_file(tmp_path / "model.json")
    config._attn_implementation = "eager"  # torch counts no fused attention on CPUs
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        GPT2LMHeadModel(config)(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    flops = counter.get_total_flops() / tokens.numel()
    assert facts["mfu"] == pytest.approx(flops * facts["tokens_per_second"] / 0.5e12, rel=1e-12)


def test_an_unknown_device_has_no_mfu_and_a_line_says_how_to_set_its_peak(build_job):
    job = build_job()
    assert not {"mfu", "mfu_palm"} & train_step(job).facts.keys()
    line = job.find(Throughput).startup_line()
    assert line == (
        "flops     221k FLOP per token; no MFU, because the peak of cpu in bf16 is unknown: set "
        "megalowbit.telemetry.peak_tflops"
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_figures_are_those_of_one_device(devices):
    class Flops:
        counted, palm = 10**9, 2 * 10**9

    throughput = Throughput(
        Flops, tokens_per_step=1, num_devices=devices, device="x", dtype="bf16", peak=100.0
    )
    found = throughput.of_speed(80_000.0)  # 80 TFLOP/s of all devices
    assert found == pytest.approx(
        {"tflops_per_device": 80 / devices, "mfu": 0.8 / devices, "mfu_palm": 1.6 / devices}
    )


def test_metrics_console_and_summary_have_the_figures(resolve, tmp_path, capsys):
    pretrain(
        resolve("megalowbit.run.steps=3", PEAK), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["mfu"] > 0 for row in rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["flops_per_token"] == COUNTED
    assert summary["flops_per_token_palm"] == PALM
    assert summary["peak_tflops"] == 0.5
    assert summary["mfu"] == pytest.approx(summary["tflops_per_device"] / 0.5)
    # two windows over the same steps, whose ends are not read at the same moment
    assert summary["mfu"] == pytest.approx(COUNTED * summary["tokens_per_second"] / 0.5e12, rel=0.3)
    output = capsys.readouterr().out
    assert "peak of cpu 0.5 TFLOP/s" in output
    heading = next(line for line in output.splitlines() if "grad_norm" in line)
    assert heading.split()[-2:] == ["MFU", "ETA"]
    assert any(line.startswith("TFLOP/s") and "MFU" in line for line in output.splitlines())
