"""Warm-started low-rank factors against torch.svd_lowrank: time, and fraction of the matrix's energy.

    python benchmarks/low_rank.py --device cpu --threads 2
    python benchmarks/low_rank.py --device cuda --shape 8192x4096 --rank 64

The bf16 matrix resembles a gradient: its singular values fall as 1/i above a floor of noise. Its singular
directions drift from call to call, so a warm start is never exact. The peer is svd_lowrank with two power
steps on an fp32 copy (the copy is not timed). Energy: 1 - ‖M - U·S·Vᵀ‖² / ‖M‖², the mean over all matrices.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timing import interleaved, keep_freed_memory, parser, positive, print_table

from megalowbit.quantize.philox import RandomKey
from megalowbit.spectral import low_rank
from megalowbit.spectral.low_rank import Factored, LowRank
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import split
from megalowbit.spectral.state import SplitState

PEER = "torch.svd_lowrank fp32"
FULL_SPLIT = "full split, qb"
DRIFT = 0.1  # angle between the directions of one matrix and the next, in radians
NOISE = 0.1  # fraction of the energy that is noise
MATRICES = 8
KEY = RandomKey(1)

Candidate = Callable[[torch.Tensor], Any]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", default=(4096, 768), type=shape, help="rows x cols")
    options.add_argument("--rank", default=60, type=positive)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"torch {torch.__version__}, {chosen.device}, {chosen.threads} threads, {chosen.rounds} rounds")
    matrices = list(drifting(*chosen.shape, chosen.device))
    candidates = every_method(chosen.rank, matrices[0])
    runs = {name: over(inputs_of(name, matrices), run) for name, run in candidates.items()}
    times = interleaved(runs, chosen.rounds, chosen.device)
    rows, cols = chosen.shape
    print_table(f"rank {chosen.rank} of {rows} × {cols}", times, PEER)
    del candidates[FULL_SPLIT]  # its energy is that of qb
    captured = {name: energy(inputs_of(name, matrices), run) for name, run in candidates.items()}
    for name, value in captured.items():
        print(f"  {name:<30}{100 * value:10.3f} % of the energy  {value / captured[PEER]:7.4f} × {PEER}")


def shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not rows x cols: write for example 4096x768")
    return int(parts[0]), int(parts[1])


def drifting(rows: int, cols: int, device: str) -> Iterator[torch.Tensor]:
    """Matrices that drift away and back, so the step from the last to the first is as small as the others."""
    generator = torch.Generator().manual_seed(0)
    directions = min(rows, cols)
    values = 1 / torch.arange(1, directions + 1)
    sides = [[torch.randn(size, directions, generator=generator) for _ in "ab"] for size in (rows, cols)]
    noise = torch.randn(rows, cols, generator=generator)
    noise *= values.norm() * NOISE**0.5 / noise.norm()
    steps = [*range(MATRICES // 2 + 1), *range(MATRICES // 2 - 1, 0, -1)]
    for step in steps:
        left, right = (torch.linalg.qr(a + DRIFT * step * b).Q for a, b in sides)
        yield (left * values @ right.t() + noise).to(device, torch.bfloat16)


def every_method(rank: int, first: torch.Tensor) -> dict[str, Candidate]:
    """Candidates by name; qb and power keep their directions from call to call."""

    def peer(matrix: torch.Tensor) -> LowRank:
        return LowRank(*torch.svd_lowrank(matrix, q=rank, niter=2))

    # In this order qb runs after bf16 products, as in training, and not after the peer's fp32 threads.
    return {
        PEER: peer,
        "svd_lowrank, niter 2": lambda matrix: low_rank.svd_lowrank(matrix, rank, 2, KEY).low_rank,
        "sampled, 2 %": lambda matrix: low_rank.sampled(matrix, rank, 0.02, KEY).low_rank,
        "power, warm, one step": warm(lambda m, v: low_rank.power(m, v, 1), first, rank),
        "random": lambda matrix: low_rank.random(matrix, rank, KEY).low_rank,
        "qb, warm": warm(low_rank.qb, first, rank),
        "qb, warm, one power step": warm(lambda m, v: low_rank.qb(m, v, 1), first, rank),
        FULL_SPLIT: full_split(rank),
    }


def warm(
    factorise: Callable[[torch.Tensor, torch.Tensor], Factored], first: torch.Tensor, rank: int
) -> Candidate:
    start = low_rank.gaussian((rank, first.shape[1]), first, KEY)
    directions = [low_rank.qb(first, start, 2).directions]

    def run(matrix: torch.Tensor) -> LowRank:
        found = factorise(matrix, directions[0])
        directions[0] = found.directions
        return found.low_rank

    return run


def full_split(rank: int) -> Candidate:
    """Factors, their quantisation and the residual, with default settings."""
    settings, state, step = OperandSplit(rank=rank), SplitState(), [0]

    def run(matrix: torch.Tensor) -> object:
        step[0] += 1
        key = RandomKey(1, step[0])
        return split(matrix, settings, state, rank=rank, step=step[0], is_replay=False, random_key=key)

    return run


def inputs_of(name: str, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    return [matrix.float() for matrix in matrices] if name == PEER else matrices


def over(inputs: list[torch.Tensor], run: Candidate) -> Callable[[], object]:
    """Returns a function that runs on the next matrix at each call."""
    turn = itertools.cycle(inputs)
    return lambda: run(next(turn))


def energy(inputs: list[torch.Tensor], run: Candidate) -> float:
    shares = []
    for matrix in inputs:
        wide, found = matrix.float(), run(matrix)
        rest = wide - (found.left.float() * found.values) @ found.right.float().t()
        shares.append(1 - float(rest.norm() / wide.norm()) ** 2)
    return sum(shares) / len(shares)


if __name__ == "__main__":
    keep_freed_memory()
    main()
