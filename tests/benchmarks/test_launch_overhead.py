"""Host time of layers: the floor where there is one, and all instructions of a step."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import launch_overhead
from benchmarks.first_hour import launches
from benchmarks.first_hour.session import Session
from benchmarks.launch_overhead import Floor, Overhead, bytecodes_of, row

ROOT = Path(__file__).parents[2]
FLOOR = Floor(5e-4, 4e-4, 2.25, 4420)
FIGURES = Overhead(
    1e-4, 3e-3, 1e-3, launches=8, operations=46, bytecodes=13110, floor=FLOOR, ratios=[0.3, 0.31, 0.32]
)


def test_a_row_without_a_floor_has_dashes_in_the_same_columns():
    whole, without = row(FIGURES), row(FIGURES._replace(floor=None))
    assert " ".join(whole.split()) == "100 3000 1000 500 400 0.31 2.25 8 46 13110 4420"
    assert " ".join(without.split()) == "100 3000 1000 – – 0.31 – 8 46 13110 –"
    assert len(whole) == len(without)


def test_the_first_gpu_hour_reports_the_floor_and_captures_graphs_without_one(monkeypatch, tmp_path):
    figures = {"nvfp4": FIGURES}
    monkeypatch.setattr(launches, "RECIPES", {"nvfp4": "nvfp4", "mxfp4": "mxfp4"})
    monkeypatch.setattr(launches, "graph", lambda name, _recipe: [launches.info("graph", name)])
    monkeypatch.setattr(
        launch_overhead,
        "overhead",
        lambda recipe, *_, **__: figures.get(recipe, FIGURES._replace(floor=None)),
    )

    def found():
        findings = list(launches.check(Session(tmp_path, "cuda", "1 × GPU")))
        assert [each.value for each in findings if each.check == "graph"] == ["nvfp4", "mxfp4"]
        return [(each.check, each.status, each.value) for each in findings if "floor" in each.check]

    assert found() == [("host time ÷ floor, nvfp4", "info", 2.25)]
    del figures["nvfp4"]
    assert found() == [("host time ÷ floor, nvfp4", "skip", None)]


@pytest.mark.slow
def test_there_is_no_floor_where_launch_plans_are_not_used():
    code = """
from unittest.mock import patch
from benchmarks import launch_overhead as overhead
from megalowbit.quantize.triton import launch_plans

with overhead.on("cpu"), patch.object(launch_plans, "_may_bypass", lambda *_: False):
    found = overhead.overhead("nvfp4", "cpu", 1)
assert found.floor is None
assert (found.launches, found.planned > 0) == (8, True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


class Looping(torch.autograd.Function):
    """A backward of many instructions."""

    rounds = 0
    is_threaded = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Looping.is_threaded = torch._C._is_multithreading_enabled()
        for _ in range(Looping.rounds):
            pass
        return grad


def looping_bytecodes(device, rounds):
    x = torch.ones(2, device=device, requires_grad=True)
    Looping.rounds = rounds
    return bytecodes_of(lambda: Looping.apply(x).sum().backward())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_instructions_of_backward_are_counted(device):
    looping_bytecodes(device, 1)  # the first backward of a process runs more instructions
    short, long = looping_bytecodes(device, 100), looping_bytecodes(device, 300)
    assert (long - short) % 200 == 0
    assert long - short >= 400


def test_backward_runs_in_the_thread_that_is_traced_and_traces_are_restored():
    def own_trace(*_):
        """As that of a debugger."""

    former, former_thread = sys.gettrace(), threading.gettrace()
    threading.settrace(own_trace)
    try:
        looping_bytecodes("cpu", 1)
        assert (sys.gettrace(), threading.gettrace()) == (former, own_trace)
    finally:
        threading.settrace(former_thread)
    assert not Looping.is_threaded
    assert torch._C._is_multithreading_enabled()
