"""From step to step a layer launches the same kernels with the same arguments, addresses apart.

A CUDA graph repeats launches with the arguments they were captured with, so a number that the host computes
anew for each step would stay that of the captured one.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

import megalowbit as mlb
from benchmarks.kernels.counting import GPU, counting
from benchmarks.kernels.layers import run_layer
from megalowbit.errors import UserError
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton.launch_arguments import random_arguments

SIZES = (128, 64, 96)
RECIPES = {
    "nvfp4": "nvfp4",
    "mxfp4, FP8 products": {"base": "mxfp4", "name": "fp8", "gemm": "fp8"},
    "metis-nvfp4": "metis-nvfp4",
    "nvidia-nvfp4": "nvidia-nvfp4",
    "split of the output gradient": {"base": "nvfp4", "name": "qb", "split_grad_output": {"rank": 8}},
}


def steps_of(recipe, gpu, stream, states, count):
    """The calls of each micro-batch."""
    found = []
    for _ in range(count):
        stream.advance()
        gpu.calls.clear()
        run_layer(mlb.recipe(recipe), SIZES, stream, states)  # a read by the host is an error there
        found.append(list(gpu.calls))
    return found


def writes(calls):
    return [call for call in calls if call[0] in ("fill_", "add_") and call[1] == torch.int64]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_only_the_counter_of_the_micro_batch_changes(recipe):
    stream, states = RandomStream(0, 0), {}
    with counting() as gpu:
        _, second, third = steps_of(recipe, gpu, stream, states, 3)
    assert len(second) > 10
    assert [call[-1] for call in writes(second) + writes(third)] == [2, 3]
    assert [call for call in second if call not in writes(second)] == [
        call for call in third if call not in writes(third)
    ]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_in_a_graph_the_counter_moves_by_the_same_number(recipe):
    stream, states = RandomStream(0, 0), {}
    with counting() as gpu:
        steps_of(recipe, gpu, stream, states, 2)
    with counting(is_capturing=True) as gpu:
        third, fourth = steps_of(recipe, gpu, stream, states, 2)
    assert third == fourth
    assert [call[-1] for call in writes(third)] == [1]


def test_a_host_argument_would_be_found(monkeypatch):
    stream, states = RandomStream(0, 0), {}
    monkeypatch.setattr(
        "megalowbit.quantize.triton.launch_arguments.random_arguments",
        lambda key, device: {"key_low": 0, "key_high": 0, "step": None, "lag": int(key.step)},
    )
    with counting() as gpu:
        second, third = steps_of("nvfp4", gpu, stream, states, 2)
    assert second != third


def test_a_graph_takes_over_a_counter_that_nothing_else_uses():
    stream = RandomStream(0, 0)
    with counting():
        eager = random_arguments(stream.key("a", "input"), GPU)["step"]
    with counting(is_capturing=True):
        captured = random_arguments(stream.key("a", "input"), GPU)["step"]
    with counting():
        later = random_arguments(stream.key("a", "input"), GPU)["step"]
    assert eager is captured
    assert later is not captured


def test_a_capture_without_a_warm_up_is_an_error():
    with counting(is_capturing=True), pytest.raises(UserError, match="run one step first"):
        random_arguments(RandomStream(0, 0).key("a", "input"), GPU)


def test_a_backward_after_a_later_forward_has_the_numbers_of_its_own():
    stream = RandomStream(0, 0)
    with counting():
        lags = []
        for _ in range(3):
            stream.advance()
            random_arguments(stream.key("a", "input"), GPU)
            lags.append(random_arguments(stream.key("a", "grad_output", step=stream.step - 1), GPU)["lag"])
    assert lags == [1, 1, 1]
