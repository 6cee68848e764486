"""TFLOP/s and MFU of a run; the model is the tiny GPT-2 of `write_config`."""

import json
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.pretrain.components.machine.throughput import Throughput
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


def test_separate_documents_need_less_attention(build_job, tmp_path):
    """Counted token by token: a document of d tokens has d² pairs in each of the two blocks."""
    texts = ["ab" * (number % 11) for number in range(400)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    data = {"corpus": str(tmp_path / "lines.jsonl"), "sequence_length": 32, "packing": "documents"}
    job = build_job(PEAK, f"megalowbit.data={json.dumps(data)}", "gradient_accumulation_steps=2")
    batches, read = [], type(job.loader).__next__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(job.loader), "__next__", lambda loader: batches.append(read(loader)) or batches[-1]
        )
        steps = [train_step(job).facts for _ in range(2)]
    assert len(batches) == 4
    expected = []
    for row in torch.cat([batch["input_ids"] for batch in batches]).tolist():
        ends = [-1, *(place for place, token in enumerate(row) if token == 0), 31]
        pairs = sum((end - start) ** 2 for start, end in pairwise(ends))
        expected.append(COUNTED - ATTENTION + 12 * 2 * 32 * pairs / 32)
    rows = len(expected) // 2
    for facts, flops in zip(steps, (expected[:rows], expected[rows:]), strict=True):
        found = facts["mfu"] * 0.5e12 / facts["tokens_per_second"]
        assert found == pytest.approx(sum(flops) / rows, rel=1e-12)
        assert found < 0.95 * COUNTED
        assert facts["mfu_palm"] == pytest.approx(PALM * facts["tokens_per_second"] / 0.5e12, rel=1e-12)
    throughput = job.find(Throughput)
    assert throughput.summary().entries["flops_per_token"] == pytest.approx(sum(expected) / len(expected))
    assert throughput.startup_line().startswith("flops     at most 221k FLOP per token")


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
