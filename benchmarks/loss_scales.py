"""How loss-scale strategies fare on gradients of known size: steps lost, and how far S stayed below its best.

Every strategy goes through the same sequences of largest gradients. A step overflows where amax·S reaches
65520, fp16's end. What S gives away is measured in octaves below the largest power of two that would not have
overflowed: small gradients are flushed by so many octaves more than they need be. No training: what it does
to a loss depends on how many gradients are small.

    python benchmarks/loss_scales.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator

from megalowbit.optim.loss_scale.base import GradientStatistics, GradScaler
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler

LIMIT = 65520.0  # rounds to infinity in fp16
TYPICAL = 2.0**-6  # where the largest gradients lie
STRATEGIES: dict[str, Callable[[], GradScaler]] = {
    "constant 2^16": lambda: ConstantGradScaler(2.0**16),
    "megatron": lambda: DynamicGradScaler(2.0**16),
    "torch": lambda: DynamicGradScaler(2.0**16, growth_interval=2000, mode="torch"),
    "megatron, 100 steps": lambda: DynamicGradScaler(2.0**16, growth_interval=100, hysteresis=1),
    "max_value": lambda: MaxValueGradScaler(2.0**16),
    "controller": lambda: ControllerGradScaler(2.0**16),
}


def steady(draw: random.Random) -> Iterator[float]:
    """Half an octave of noise."""
    while True:
        yield TYPICAL * 2 ** draw.gauss(0, 0.5)


def decay(draw: random.Random) -> Iterator[float]:
    """Six decades down over the run, as gradients shrink while a loss falls."""
    for step in range(10**9):
        yield TYPICAL * 10 ** (-6 * step / 4000) * 2 ** draw.gauss(0, 0.5)


def spikes(draw: random.Random) -> Iterator[float]:
    """One batch in a hundred has gradients 100 times as large."""
    while True:
        yield TYPICAL * 2 ** draw.gauss(0, 0.5) * (100 if draw.random() < 0.01 else 1)


def jump(draw: random.Random) -> Iterator[float]:
    """Sixteen times as large from step 2000 on."""
    for step in range(10**9):
        yield TYPICAL * 2 ** draw.gauss(0, 0.5) * (16 if step >= 2000 else 1)


SEQUENCES = {"steady": steady, "decay": decay, "spikes": spikes, "jump": jump}


def run(scaler: GradScaler, amaxes: Iterator[float], steps: int) -> tuple[int, float]:
    """Overflowed steps, and the median of octaves given away over the others."""
    overflows, given_away = 0, []
    for _, amax in zip(range(steps), amaxes, strict=False):
        scale, found_inf = scaler.scale, amax * scaler.scale >= LIMIT
        overflows += found_inf
        if not found_inf:
            given_away.append(math.floor(math.log2(LIMIT / amax)) - math.log2(scale))
        # an overflowed step has no finite maximum to show
        scaler.update(found_inf, GradientStatistics(loss_scale=scale, amax=None if found_inf else amax))
    return overflows, statistics.median(given_away) if given_away else math.nan


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--steps", type=int, default=4000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", action="store_true")
    arguments = options.parse_args()
    results = {
        name: {
            sequence: run(make(), amaxes(random.Random(arguments.seed)), arguments.steps)
            for sequence, amaxes in SEQUENCES.items()
        }
        for name, make in STRATEGIES.items()
    }
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{arguments.steps} steps: overflowed / median octaves given away\n")
    print(f"{'':22}" + "".join(f"{sequence:>16}" for sequence in SEQUENCES))
    for name, row in results.items():
        print(f"{name:22}" + "".join(f"{lost:>9} / {octaves:<4.1f}" for lost, octaves in row.values()))


if __name__ == "__main__":
    main()
