"""Samples and histograms on real processes: the same in every layout, and training does not notice."""

import json

import pytest
from forked_ranks import run_ranks
from quick_cases import slow_except

from launchers import SPEEDS, metrics, write_config

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAYOUTS = {  # processes, keys
    "one": (1, {}),
    "two ranks": (2, {"gradient_accumulation_steps": 1}),
    "tensor 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "ZeRO 3": (2, {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}),
    "stages 2": (2, {"pipeline": {"stages": 2}}),
    "ZeRO 2": (2, {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}),
}
WRITING = [name for name in LAYOUTS if name not in ("one", "stages 2")]
OTHERS = slow_except(["ZeRO 3"], WRITING)
SAMPLES = {"samples": {"prompts": ["The ", ""], "every": 3, "tokens": 8}}
HISTOGRAMS = {"histograms": {"every": 3}}


def train(folder, layout, name, **block):
    processes, keys = LAYOUTS[layout]
    write_config(folder, model=NO_DROPOUT, block=block, **keys)
    given = ("--ds-config", folder / "tiny.json", "--run-dir", folder / name)
    done = run_ranks(*given, cwd=folder, processes=processes)
    assert done.code == 0, done.output


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("layout", OTHERS)
def test_texts_do_not_depend_on_the_layout(tmp_path, layout):
    """In fp32 with nothing quantised, where the order of sums does not decide about tokens."""
    for name in ("one", layout):
        train(tmp_path, name, name, precision="fp32", recipe="bf16", **SAMPLES)
    one, other = (lines_of(tmp_path / name, "samples.jsonl") for name in ("one", layout))
    assert [(row["step"], row["prompt"]) for row in one] == [
        (step, prompt) for step in (3, 6) for prompt in ("The ", "")
    ]
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*WRITING, "stages 2"])
def test_every_layout_counts_all_blocks(tmp_path, layout):
    for name in ("one", layout):
        train(tmp_path, name, name, precision="fp32", recipe="nvfp4", **HISTOGRAMS)
    one, other = (lines_of(tmp_path / name, "histograms.jsonl") for name in ("one", layout))
    assert [(row["step"], row["layer"]) for row in one] == [(row["step"], row["layer"]) for row in other]
    for rows in zip(one, other, strict=True):
        first, second = ({row["first"] + at: count for at, count in enumerate(row["counts"])} for row in rows)
        total = sum(first.values())
        assert sum(second.values()) == total
        # weights differ a little after some steps; a shard that counts twice or not would be half of them
        powers = first.keys() | second.keys()
        moved = sum(abs(first.get(power, 0) - second.get(power, 0)) for power in powers)
        assert moved <= 0.1 * total, (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("layout", WRITING)
def test_training_does_not_notice(tmp_path, layout):
    """In FP4 with stochastic rounding, cached weights and counts: equal records."""
    train(tmp_path, layout, "with", precision="bf16", recipe="nvfp4", **SAMPLES, **HISTOGRAMS)
    train(tmp_path, layout, "without", precision="bf16", recipe="nvfp4")
    with_them, without = (
        [{key: value for key, value in row.items() if key not in SPEEDS} for row in metrics(tmp_path / name)]
        for name in ("with", "without")
    )
    assert with_them == without
    assert len(without) == 6
