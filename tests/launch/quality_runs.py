"""The runs whose losses tests compare at the end of training."""

import json
import statistics

SEEDS = (1,)  # a run repeats bit for bit; gaps over several seeds are in docs/experiments/loss.md
STEPS = 500  # of configs/gpt2_tiny_quality.json, at the end of its learning-rate decay
LAST = 100  # steps whose mean loss is compared


def mean_loss(folder):
    """Mean loss of the last steps of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    assert len(losses) == STEPS
    return statistics.mean(losses[-LAST:])
