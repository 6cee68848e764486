"""From step to step a layer launches the same kernels with the same arguments, addresses apart.

A CUDA graph repeats launches with the arguments they were captured with, so a number that the host computes
anew for each step would stay that of the captured one.
"""

from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from recording_chooser import RecordingChooser
from triton_comparison import compare_in_a_process

import megalowbit as mlb
from benchmarks.kernels.counting import GPU, counting
from benchmarks.kernels.layers import run_layer
from megalowbit import cuda_graphs
from megalowbit.errors import UserError
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton.launch_arguments import random_arguments

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("replayed_steps.py")
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


@pytest.mark.parametrize("recipe", list(RECIPES.values())[:-1], ids=list(RECIPES)[:-1])
def test_in_a_graph_the_counter_moves_by_the_same_number(recipe):
    stream, states = RandomStream(0, 0), {}
    with counting() as gpu:
        steps_of(recipe, gpu, stream, states, 2)
    with counting(capture=1) as gpu:
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


def drawn(stream, capture=None):
    """Arguments of a draw; what a counter would hold is not there."""
    with counting(capture=capture) as gpu:
        return random_arguments(stream.key("a", "input"), GPU), list(gpu.calls)


def test_each_capture_moves_a_counter_on_that_nothing_else_uses():
    stream = RandomStream(0, 0)
    eager, _ = drawn(stream)
    for capture in (1, 2):  # in one micro-batch
        captured, calls = drawn(stream, capture)
        assert [call[0] for call in calls] == ["select", "add_"]
        assert drawn(stream, capture) == (captured, [])
        assert captured["step"] is not eager["step"]
    later, calls = drawn(stream)
    assert later["step"] is eager["step"]
    assert not calls


def test_splits_that_keep_directions_are_refused():
    stream, states = RandomStream(0, 0), {}
    recipe = {"base": "nvfp4", "name": "qb", "split_grad_output": {"rank": 8}}
    with counting() as gpu:
        steps_of(recipe, gpu, stream, states, 2)
    with counting(capture=1) as gpu, pytest.raises(UserError, match="split with the method 'mean'"):
        steps_of(recipe, gpu, stream, states, 1)


def test_signs_that_are_drawn_for_each_micro_batch_are_refused():
    layer = mlb.BitLinear(64, 96, recipe="quartet-2")
    layer.random_stream = RandomStream(0, 0)
    layer.weight = torch.nn.Parameter(layer.weight.detach(), requires_grad=False)
    use = layer.begin_use()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "is_capturing", lambda device: device == layer.weight.device)
        with pytest.raises(UserError, match=r"would repeat the signs .* BitLinear\(64, 96\) draws"):
            layer.context(use, compute_dtype=torch.float32, needs_grad=False)
        layer.recipe = "nvidia-nvfp4"  # signs are those of the run
        assert layer.context(use, compute_dtype=torch.float32, needs_grad=False).hadamard_signs


@pytest.mark.parametrize(
    ("slot", "error"),
    [
        ("observer", "set_observer.model, None. before"),
        ("chooser", "the precision that the chooser of .* turn"),
    ],
)
def test_observers_and_choosers_are_refused(slot, error, monkeypatch):
    """Replays would tell an observer nothing, and repeat the precision of the captured step."""
    layer, x = mlb.BitLinear(64, 96), torch.ones(2, 64)
    layer.random_stream = RandomStream(0, 0)
    setattr(layer, slot, None)
    monkeypatch.setattr(cuda_graphs, "is_capturing", lambda device: device == layer.weight.device)
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda _device: 1)
    layer(x)
    setattr(layer, slot, RecordingChooser() if slot == "chooser" else Mock())
    with pytest.raises(UserError, match=error):
        layer(x)
    if slot == "observer":
        layer.eval()(x)  # it is told nothing then


def test_a_graph_neither_reads_nor_fills_a_weight_cache(monkeypatch):
    layer = mlb.BitLinear(64, 96)
    layer.random_stream, layer.weight_slot = RandomStream(0, 0), WeightSlot()
    use = layer.begin_use()
    settings = {"compute_dtype": torch.float32, "needs_grad": False}
    assert layer.context(use, **settings).weights is layer.weight_slot
    monkeypatch.setattr(cuda_graphs, "is_capturing", lambda _device: True)
    assert layer.context(use, **settings).weights is None


@pytest.mark.slow
@pytest.mark.parametrize("recipes", ["others", "captures", ",".join(sorted(mlb.recipes()))])
def test_replays_have_the_numbers_of_steps_that_are_not_captured(recipes):
    compare_in_a_process(
        "cpu", recipes, str(PROGRAM), TRITON_INTERPRET="1", MEGALOWBIT_BACKEND="triton", PYTHONPATH=str(ROOT)
    )


def test_a_capture_without_a_warm_up_is_an_error():
    with counting(capture=1), pytest.raises(UserError, match="run one step first"):
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
