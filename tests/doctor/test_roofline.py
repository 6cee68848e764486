"""Times against published runs, and the parts of the roofline against sums written out by hand."""

from dataclasses import replace

import pytest

from launchers import ROOT
from megalowbit.doctor.roofline import (
    EFFICIENCY,
    assumptions,
    bus,
    run_seconds,
    step_times,
    why_unknown,
)
from megalowbit.doctor.target import TARGETS, cpu_target

H100, A100, B200 = TARGETS["h100"], TARGETS["a100"], TARGETS["b200"]
LLAMA_405B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MPT_7B = {
    "model_type": "gpt2",
    "vocab_size": 50368,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 32,
    "n_head": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def megatron_flops(*, hidden, ffn, layers, heads, kv_heads, vocabulary, sequence):
    """FLOPs of a token of a gated model: github.com/NVIDIA/dgxc-benchmarking, llama3.1/README, "Notes"."""
    attention = 12 * layers * hidden**2 * (1 + kv_heads / heads + sequence / hidden)
    return attention + 18 * layers * ffn * hidden + 6 * vocabulary * hidden


def test_flops_of_llama3_8b_are_those_of_another_formula(large):
    plan = large(processes=8, micro_batch=2, batch=16)
    expected = megatron_flops(
        hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256, sequence=8192
    )
    assert plan.flops.counted == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mfu", "tokens_per_second"),
    [(0.33, 5762), (0.39, 6667)],  # without and with torch.compile
)
def test_llama3_8b_on_8_h100_at_its_published_mfu(large, mfu, tokens_per_second):
    """pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1: "33% to 39% MFU"."""
    plan = large("zero_optimization.stage=3", processes=8, micro_batch=2, batch=16)
    (time,) = step_times(plan, H100, mfu)
    assert time.tokens_per_second / 8 == pytest.approx(tokens_per_second, rel=0.15)
    assert time.mfu == pytest.approx(mfu)


@pytest.mark.slow
def test_llama3_405b_on_512_h100_at_its_published_mfu(large):
    """NVIDIA/dgxc-benchmarking, llama3.1/README of 2025: BF16, 19.810 s a step, 105,863 tokens/s, 55.34 %."""
    plan = large("tensor_parallel.autotp_size=8", processes=512, micro_batch=1, batch=256, model=LLAMA_405B)
    (time,) = step_times(plan, H100, 0.5534)
    assert plan.step_tokens == 256 * 8192
    assert time.seconds == pytest.approx(19.810, rel=0.15)
    assert time.tokens_per_second == pytest.approx(105863, rel=0.15)


@pytest.mark.slow
def test_llama3_405b_of_meta_at_the_mfu_of_its_paper(large):
    """arXiv:2407.21783, table 4: 16,384 H100, 400 TFLOP/s each, 41 %; 15.6 T tokens. Model card of Llama 3.1
    405B: 30.84 M GPU hours. The grid of the paper cannot be had here, and these figures do not need it."""
    plan = large(
        "tensor_parallel.autotp_size=8", processes=16384, micro_batch=1, batch=2048, model=LLAMA_405B
    )
    (time,) = step_times(plan, H100, 0.41)
    per_device = plan.flops.counted * time.tokens_per_second / 16384
    assert per_device == pytest.approx(400e12, rel=0.02)
    hours = 15.6e12 / time.tokens_per_second / 3600 * 16384
    assert hours == pytest.approx(30.84e6, rel=0.15)


def test_the_model_cards_of_8b_do_not_have_the_mfu_of_the_paper(large):
    """H100 hours as the cards report them, for 15 T tokens; the paper's 38 to 43 % are those of 405B.

    docs/doctor.md quotes each figure."""
    plan = large(processes=8, micro_batch=2, batch=16)
    page = " ".join((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").split())
    (time,) = step_times(plan, H100, 0.4)
    at_40_percent = 15e12 / time.tokens_per_second / 3600 * 8
    for hours, model, share in ((1.3, "Llama 3 8B", 0.188), (1.46, "Llama 3.1 8B", 0.167)):
        implied = plan.flops.counted * 15e12 / (hours * 1e6 * 3600) / 989e12
        assert implied == pytest.approx(share, abs=0.0005)
        assert f"{share:.1%}".replace("%", " %") in page
        assert f"{at_40_percent / (hours * 1e6):.2f}" in page
        assert f"{hours:g} M" in page
        assert model in page


PUBLISHED = {  # GPUs, micro-batch, batch, target, tokens/s of a GPU, model, overrides
    "torchtitan, 8B on 8 H100 with 2.4 TB/s": (
        8, 2, 16, replace(H100, bandwidth=2400), 5762, None,
        ["zero_optimization.stage=3", "megalowbit.activation_checkpointing.every=2"],
    ),
    "torchtitan, 8B on 64 A100": (
        64, 1, 64, A100, 2904, None,
        ["zero_optimization.stage=3", "megalowbit.activation_checkpointing.every=2"],
    ),
    "llm-foundry, 7B on 8 H100": (
        8, 6, 48, H100, 10643, MPT_7B,
        ["zero_optimization.stage=3", "megalowbit.data.sequence_length=2048"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_roofline_is_within_30_percent_of_published_runs(large, name):
    """Nothing was fitted to them. torchtitan: docs/performance.md and the page above; its H100 were capped at
    500 W. llm-foundry: scripts/train/benchmarking/README.md, 7b with 2,048 tokens, MFU 46.44 %."""
    processes, micro_batch, batch, target, published, model, overrides = PUBLISHED[name]
    plan = large(*overrides, processes=processes, micro_batch=micro_batch, batch=batch, model=model)
    (time,) = step_times(plan, target, None)
    assert time.tokens_per_second / processes == pytest.approx(published, rel=0.3)


def test_products_take_their_flops_at_a_share_of_the_peak(large):
    plan = large(processes=1, micro_batch=2, batch=8)
    (time,) = step_times(plan, H100, None)
    # head: a fourth product, because its logits are computed again in chunks
    head = 4 / 3 * 6 * 128256 * 4096
    blocks = plan.flops.matrices - 6 * 128256 * 4096
    expected = (head + blocks) * plan.step_tokens / (989e12 * EFFICIENCY["products"])
    assert time.terms["products"] == pytest.approx(expected, rel=0.01)


def test_recomputation_adds_a_forward_and_a_mask_doubles_attention(large):
    base = step_times(large(processes=1, micro_batch=1, batch=8), H100, None)[0].terms
    every = "megalowbit.activation_checkpointing.every=1"
    again = step_times(large(every, processes=1, micro_batch=1, batch=8), H100, None)[0].terms
    packing = "megalowbit.data.packing=documents"
    masked = step_times(large(packing, processes=1, micro_batch=1, batch=8), H100, None)[0].terms
    assert 1.25 < again["products"] / base["products"] < 1.34
    assert again["attention"] / base["attention"] == pytest.approx(9 / 7)
    assert masked["attention"] / base["attention"] == pytest.approx(2)
    assert masked["products"] == base["products"]


def test_native_fp4_is_faster_than_emulated_and_the_late_switch_is_not(large):
    recipe = '{"base": "nvfp4", "layout": "per_gemm", "gemm": "%s"}'
    switch = 'megalowbit.late_switch={"at": 0.7, "scope": "all"}'
    native, emulated = (
        step_times(
            large(f"megalowbit.recipe={recipe % gemm}", switch, processes=1, micro_batch=1, batch=8),
            B200,
            None,
        )
        for gemm in ("fp4", "bf16")
    )
    assert [each.share for each in native] == pytest.approx([0.7, 0.3])
    assert native[0].terms["products"] < 0.5 * emulated[0].terms["products"]
    assert native[1].terms["products"] == pytest.approx(emulated[1].terms["products"])
    assert native[0].terms["quantisation"] > 0 == native[1].terms["quantisation"]


def test_the_run_weighs_its_phases(large):
    switch = 'megalowbit.late_switch={"at": 0.7, "scope": "all"}'
    plan = large("megalowbit.recipe=nvfp4", switch, processes=1, micro_batch=1, batch=8)
    first, last = step_times(plan, H100, None)
    expected = plan.steps * (0.7 * first.seconds + 0.3 * last.seconds)
    assert run_seconds(plan, [first, last]) == pytest.approx(expected)


@pytest.mark.parametrize(("stage", "passes"), [(0, 8), (1, 6), (2, 4 * 4 + 2)])
def test_messages_of_zero_are_rings_over_the_network(large, stage, passes):
    """Bytes a parameter: fp32 gradients, twice if all ranks get the sum; half weights. 4 micro-batches."""
    plan = large(f"zero_optimization.stage={stage}", processes=16, micro_batch=1, batch=64)
    (time,) = step_times(plan, H100, None)
    speed = 400e9 * EFFICIENCY["network"]  # eight adapters of a host, less than NVLink's 450
    assert time.terms["messages"] == pytest.approx(passes * 15 / 16 * plan.parameters / speed)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (range(8), 450),  # one host
        (range(16), 400),  # two hosts, eight adapters each
        (range(0, 16, 8), 50),  # one rank of each host
        (range(0, 16, 2), 200),
    ],
)
def test_a_ring_uses_the_link_of_a_host_or_the_adapters_of_its_ranks(ranks, expected):
    assert bus(H100, list(ranks)) == pytest.approx(expected * 1e9 * EFFICIENCY["network"])


def test_nvlink_ends_at_the_host_except_in_a_rack_of_hosts(large):
    """Eight ranks on two hosts of four: four adapters of 50 GB/s each, or NVLink of 900 in an NVL72."""
    fours = replace(H100, devices_of_host=4)
    assert (fours.domain, TARGETS["gb200"].domain, H100.domain) == (4, 72, 8)
    assert bus(fours, range(4)) == pytest.approx(450e9 * 0.8)
    assert bus(fours, range(8)) == pytest.approx(200e9 * 0.8)
    assert bus(TARGETS["gb200"], range(8)) == pytest.approx(900e9 * 0.8)
    assert bus(replace(H100, devices_of_host=16), range(16)) == pytest.approx(400e9 * 0.8)
    plan = large("zero_optimization.stage=0", processes=8, micro_batch=1, batch=8)
    (time,) = step_times(plan, fours, None)
    assert time.terms["messages"] == pytest.approx(2 * 4 * plan.parameters * 7 / 8 / 160e9)


def test_a_measured_bandwidth_counts_in_full():
    within = replace(H100, link=300, measured=("link",))
    assert bus(within, range(8)) == pytest.approx(300e9)
    assert bus(within, range(16)) == pytest.approx(300e9)  # adapters reach 8 · 50 · 80 %
    between = replace(H100, network=30, measured=("network",))
    assert bus(between, range(16)) == pytest.approx(240e9)
    assert bus(between, range(8)) == pytest.approx(450e9 * EFFICIENCY["network"])


def test_a_measured_bandwidth_is_named_among_the_assumptions(large):
    plan = large(processes=16, micro_batch=1, batch=64)
    measured = replace(H100, network=30, measured=("network",))
    assert "network as NCCL reached it here, in full" in assumptions(plan, measured, None)
    assert not any("NCCL" in line for line in assumptions(plan, H100, None))
    assert "network 30 GB/s (measured)" in measured.describe()


def test_an_unknown_peak_of_a_format_that_is_multiplied_is_named_among_the_assumptions(tiny):
    plan = tiny('megalowbit.recipe={"base": "mxfp4", "gemm": "fp8"}', "megalowbit.telemetry.peak_tflops=1000")
    known, bf16 = TARGETS["mi355x"], tiny("megalowbit.telemetry.peak_tflops=1000")
    unknown = replace(known, name="new", device="another device")
    lines = [line for line in assumptions(plan, unknown, None) if "is unknown" in line]
    assert lines == ["the peak of new in fp8 is unknown: such products count at that of bf16"]
    for every in (assumptions(plan, known, None), assumptions(bf16, unknown, None)):
        assert not any("unknown" in line for line in every)


def test_element_wise_operations_of_a_rank_are_on_its_share_of_the_mlp(large):
    plan = large("tensor_parallel.autotp_size=4", processes=4, micro_batch=1, batch=8)
    (time,) = step_times(plan, H100, None)
    elements = 84 * 4096 + 20 * 2 * 4096 / 4 + 10 * 14336 / 4  # of a token in a block
    moved = 8 * 8192 * (32 * 3 * elements + 34 * 128256)
    assert time.terms["element-wise"] == pytest.approx(moved / (3350e9 * EFFICIENCY["memory"]))


def test_overlapped_messages_hide_behind_computing(large):
    stage = ("zero_optimization.stage=1", "zero_optimization.overlap_comm=true")
    (time,) = step_times(large(*stage, processes=16, micro_batch=1, batch=64), H100, None)
    assert time.terms["messages"] == 0


def test_a_pipeline_waits_for_its_ends(large):
    plain = step_times(large(processes=1, micro_batch=1, batch=8), H100, None)[0]
    stages = "pipeline.stages=4"
    piped = step_times(large(stages, processes=4, micro_batch=1, batch=8), H100, None)[0]
    assert piped.terms["attention"] / plain.terms["attention"] == pytest.approx((8 + 3) / 8 / 4)


def test_a_cpu_and_an_unknown_gpu_have_no_time_but_a_reason(tiny):
    plan = tiny()
    assert step_times(plan, cpu_target(64.0), None) == []
    assert "telemetry.peak_tflops" in why_unknown(plan, cpu_target(64.0), None)
    unknown = replace(H100, name="RTX", device="NVIDIA GeForce RTX 4090", bandwidth=None)
    assert "is unknown" in why_unknown(plan, unknown, None)
    assert assumptions(plan, unknown, None) == []


def test_a_peak_of_the_configuration_replaces_the_vendors(tiny):
    plan = tiny("megalowbit.telemetry.peak_tflops=100")
    (time,) = step_times(plan, cpu_target(64.0), 0.5)
    assert time.seconds == pytest.approx(plan.flops.counted * plan.step_tokens / 50e12)
    assert "100 TFLOP/s" in assumptions(plan, cpu_target(64.0), 0.5)[0]
    assert "give --assume-mfu" in why_unknown(plan, cpu_target(64.0), None)
