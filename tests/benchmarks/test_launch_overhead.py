"""Host time of layers: all instructions of a step are counted."""

import sys
import threading

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.launch_overhead import bytecodes_of


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
