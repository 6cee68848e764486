"""Histograms of block maxima: counted by hand, recorded, shown, and without effect on training."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.checks import check_config
from megalowbit.pretrain.components.media.histograms import (
    EDGES,
    HIGHEST,
    LOWEST,
    NUM_BINS,
    count_block_maxima,
    trimmed,
)
from megalowbit.pretrain.run import pretrain

SECTION = 'megalowbit.histograms={"every": 4}'


def by_hand(weight):
    """Counts of powers of two, block by block, in Python floats."""
    counts = [0] * NUM_BINS
    for row in weight.double().tolist():
        for start in range(0, len(row), 16):
            largest = max(abs(value) for value in row[start : start + 16])
            power = math.floor(math.log2(largest)) if largest else LOWEST
            counts[min(max(power - LOWEST, 0), NUM_BINS - 1)] += 1
    return counts


@pytest.mark.parametrize("shape", [(3, 16), (5, 40), (1, 1), (7, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_block_maxima_are_counted(shape, dtype):
    generator = torch.Generator().manual_seed(shape[1])
    scales = torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    weight = (torch.randn(shape, generator=generator) * scales).to(dtype)
    weight[0, 0] = 0
    assert count_block_maxima(weight).tolist() == by_hand(weight)


def test_powers_of_two_zero_tiny_and_not_finite_maxima_have_their_bins():
    weight = torch.zeros(6, 16)
    weight[1, 3], weight[2, 0], weight[3, 15] = 1.0, -2.0, 2.0**-100
    weight[4, 1], weight[5, 2] = math.nan, math.inf
    counts = count_block_maxima(weight)
    assert counts[0] == 2  # zero and 2^-100
    assert (counts[-LOWEST], counts[1 - LOWEST], counts[-1]) == (1, 1, 2)
    assert counts.sum() == 6
    assert (EDGES[0], EDGES[-1], len(EDGES)) == (LOWEST, HIGHEST, NUM_BINS + 1)


def test_lines_have_no_zeros_at_their_ends():
    counts = [0] * NUM_BINS
    assert trimmed(counts) == {"first": LOWEST, "counts": [0]}
    counts[3], counts[5] = 7, 2
    assert trimmed(counts) == {"first": LOWEST + 3, "counts": [7, 0, 2]}


def test_a_run_records_its_weights_and_trains_as_without(resolve, tmp_path):
    rows = {}
    for name, overrides in (("with", (SECTION,)), ("without", ())):
        pretrain(resolve(*overrides), ProcessIdentity(), run_dir=tmp_path / name, is_resume=False)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [
            {key: value for key, value in json.loads(line).items() if key not in SPEEDS} for line in lines
        ]
    assert rows["with"] == rows["without"]
    lines = [json.loads(line) for line in (tmp_path / "with" / "histograms.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {4, 6}
    weights = load_file(tmp_path / "with" / "hf" / "model.safetensors")  # of the last step
    last = [line for line in lines if line["step"] == 6]
    assert len(last) == len({line["layer"] for line in last}) > 1
    events = EventAccumulator(str(tmp_path / "with" / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    for line in last:
        stored = weights[f"{line['layer']}.weight"]
        expected = trimmed(by_hand(stored.t()))  # GPT-2's projections are stored as (in, out)
        assert {name: line[name] for name in ("first", "counts")} == expected
        shown = events.Histograms(f"histograms/weight_block_max_log2/{line['layer']}")
        assert [event.step for event in shown] == [4, 6]
        assert shown[-1].histogram_value.num == sum(line["counts"])


def test_a_recipe_without_low_bit_layers_is_refused(resolve):
    config = resolve(SECTION, "megalowbit.recipe=bf16")
    with pytest.raises(UserError, match=r"histograms.*'bf16' has no low-bit layers: leave it out"):
        check_config(config)


@pytest.mark.parametrize("value", ['{"every": 0}', '{"every": true}', '{"bins": 3}', "5"])
def test_values_that_mean_nothing_are_refused(resolve, value):
    with pytest.raises(UserError, match=r"megalowbit\.histograms"):
        resolve(f"megalowbit.histograms={value}")
