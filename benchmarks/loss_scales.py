"""Loss-scale strategies on gradients of known size: steps lost, and how far S stayed below its best value.

Every strategy sees the same sequences of gradient amaxes. A step overflows if amax·S reaches 65520, the end
of fp16. The distance of S from its best value is measured in octaves below the largest power of two that
would not have overflowed: the threshold below which gradients are flushed is too high by that many octaves.
Nothing is trained: the effect on a loss depends on how many gradients are small.

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
TYPICAL = 2.0**-6  # amax of the gradients in a typical step
STRATEGIES: dict[str, Callable[[], GradScaler]] = {
    "constant 2^16": lambda: ConstantGradScaler(2.0**16),
    "megatron": lambda: DynamicGradScaler(2.0**16),
    "torch": lambda: DynamicGradScaler(2.0**16, growth_interval=2000, mode="torch"),
    "megatron, 100 steps": lambda: DynamicGradScaler(2.0**16, growth_interval=100, hysteresis=1),
    "max_value": lambda: MaxValueGradScaler(2.0**16),
    "controller": lambda: ControllerGradScaler(2.0**16),
}


def steady(draw: random.Random) -> Iterator[float]:
    """Constant size with half an octave of noise."""
    while True:
        yield TYPICAL * 2 ** draw.gauss(0, 0.5)


def decay(draw: random.Random) -> Iterator[float]:
    """Gradients shrink by six decades over 4000 steps, as they do while a loss falls."""
    for step in range(10**9):
        yield TYPICAL * 10 ** (-6 * step / 4000) * 2 ** draw.gauss(0, 0.5)


def spikes(draw: random.Random) -> Iterator[float]:
    """One batch in a hundred has gradients 100 times as large."""
    while True:
        yield TYPICAL * 2 ** draw.gauss(0, 0.5) * (100 if draw.random() < 0.01 else 1)


def jump(draw: random.Random) -> Iterator[float]:
    """Gradients are sixteen times as large from step 2000 on."""
    for step in range(10**9):
        yield TYPICAL * 2 ** draw.gauss(0, 0.5) * (16 if step >= 2000 else 1)


SEQUENCES = {"steady": steady, "decay": decay, "spikes": spikes, "jump": jump}


def run(scaler: GradScaler, amaxes: Iterator[float], steps: int) -> tuple[int, float]:
    """Number of overflowed steps; over the others, the median of octaves by which S was too low."""
    overflows, octaves_too_low = 0, []
    for _, amax in zip(range(steps), amaxes, strict=False):
        scale, found_inf = scaler.scale, amax * scaler.scale >= LIMIT
        overflows += found_inf
        if not found_inf:
            octaves_too_low.append(math.floor(math.log2(LIMIT / amax)) - math.log2(scale))
        # an overflowed step has no finite amax
        scaler.update(found_inf, GradientStatistics(loss_scale=scale, amax=None if found_inf else amax))
    return overflows, statistics.median(octaves_too_low) if octaves_too_low else math.nan


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
    print(f"{arguments.steps} steps: overflowed / median octaves below the best S\n")
    print(f"{'':22}" + "".join(f"{sequence:>16}" for sequence in SEQUENCES))
    for name, row in results.items():
        print(f"{name:22}" + "".join(f"{lost:>9} / {octaves:<4.1f}" for lost, octaves in row.values()))


if __name__ == "__main__":
    main()
