"""A slow, plain quantisation by block to count by hand, and real processes that talk over gloo."""

import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from forks import Forked

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16
LARGEST_SCALE = 448.0
WORKER = Path(__file__).with_name("two_ranks_worker.py")


def e4m3_like(value: float) -> float:
    """Four significant bits, at most 448."""
    mantissa, exponent = math.frexp(value)
    return min(math.ldexp(round(mantissa * 16) / 16, exponent), LARGEST_SCALE)


def count_by_hand(x: torch.Tensor) -> tuple[list[int], list[float]]:
    """Counts and errors of one tensor, element by element, in Python floats."""
    values = x.double().flatten().tolist()
    nonfinite = sum(not math.isfinite(value) for value in values)
    saturated = upper_half = underflow = blocks = saturated_scales = zero_blocks = 0
    errors, squares = [], []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        blocks += 1
        wanted = max(abs(value) for value in block) / 6
        scale = e4m3_like(wanted) if math.isfinite(wanted) else math.nan
        saturated_scales += wanted > LARGEST_SCALE
        quantised = []
        for value in block:
            code = abs(value) / scale if scale else 0.0
            saturated += code > 6
            upper_half += code > 3
            near = min(E2M1, key=lambda point: abs(point - code)) * scale
            quantised.append(near)
            underflow += value != 0 and near == 0
            errors.append((abs(value) - near) ** 2)
            squares.append(value**2)
        zero_blocks += not any(quantised)
    counts = [len(values), saturated, upper_half, underflow, nonfinite, blocks, saturated_scales, zero_blocks]
    return counts, [math.fsum(errors), math.fsum(squares)]


@pytest.fixture(name="count_by_hand")
def count_by_hand_fixture():
    return count_by_hand


@pytest.fixture(scope="module")
def run_two_ranks(tmp_path_factory):
    """Run a scenario of `two_ranks_worker.py` in two processes; returns what each rank printed, as JSON."""

    @functools.cache
    def run(scenario: str) -> list[object]:
        folder = tmp_path_factory.mktemp("ranks")
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[2])}
        ranks = [
            Forked(
                WORKER, scenario, rank, folder / "rendezvous", env=environ,
                output=folder / f"output{rank}", errors=str(folder / f"errors{rank}"),
            )
            for rank in range(2)
        ]  # fmt: skip
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], "".join(path.read_text() for path in folder.glob("errors*"))
        return [json.loads((folder / f"output{rank}").read_text()) for rank in range(2)]

    return run
