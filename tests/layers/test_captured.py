"""Operators that a CUDA graph may capture: their bits, what they read, and what inductor says about them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton_comparison import compare_in_a_process

import megalowbit as mlb
from benchmarks.kernels.counting import GPU, counting
from benchmarks.kernels.layers import matrices
from megalowbit.layers import compiled
from megalowbit.quantize import backends
from megalowbit.quantize.random_stream import RandomStream

PROGRAM = Path(__file__).with_name("captured_steps.py")
DRAWING = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_backward_outputgrad": "fp4e2m1b"}
DTYPES = (torch.bfloat16, torch.bfloat16, None)  # of input, weight and bias
SIZES = (128, 64, 96)


def layer_of(recipe="nvfp4"):
    layer = mlb.BitLinear(*SIZES[1:], bias=False, recipe=recipe, dtype=torch.bfloat16)
    layer.random_stream = RandomStream(0, 0)
    return layer


def forward_and_backward(forward, backward, layer, keys, x, weight, grad):
    """What a compiled layer runs on the GPU."""
    nothing, none = (None,) * 4, torch.bfloat16
    _, *parts = forward(x, weight, *nothing, keys, layer.handle, none, True, True, True)
    shapes = list(x.shape), list(weight.shape)
    return backward(grad, [keys, *parts], [], layer.handle, none, *shapes, *DTYPES, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", DRAWING], ids=["nvfp4", "drawing"])
def test_steps_have_the_bits_of_an_eager_model(recipe):
    compare_in_a_process(
        "cpu", json.dumps(recipe), str(PROGRAM), TRITON_INTERPRET="1", MEGALOWBIT_BACKEND="triton"
    )


@pytest.mark.parametrize("recipe", ["nvfp4", DRAWING, "nvidia-nvfp4"], ids=["nvfp4", "drawing", "nvidia"])
def test_two_steps_launch_the_same_and_write_no_counter(recipe):
    layer, found = layer_of(recipe), []
    with counting(capture=1) as gpu:
        for _ in range(3):  # the first one also makes samples of what is kept
            layer.random_stream.advance()
            keys = torch.empty(2, 2, dtype=torch.int64, device=GPU)
            gpu.calls.clear()
            x, weight, grad = matrices(*SIZES)
            forward_and_backward(compiled._run_forward, compiled._run_backward, layer, keys, x, weight, grad)
            found.append(list(gpu.calls))
    assert len(found[1]) > 10
    assert found[1] == found[2]
    assert not [call for call in found[1] if call[0] in ("fill_", "add_") and call[1] == torch.int64]


def test_inductor_leaves_only_the_drawing_of_keys_out_of_its_graphs():
    layer = layer_of()

    def step(micro_batch, x, weight, grad):
        keys = compiled.draw_keys(micro_batch, layer.handle, GPU)
        return forward_and_backward(
            compiled._captured_forward, compiled._captured_backward, layer, keys, x, weight, grad
        )

    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = [torch.empty(shape, dtype=torch.bfloat16, device=GPU) for shape in ((128, 64), (96, 64))]
        grad = torch.empty(128, 96, dtype=torch.bfloat16, device=GPU)
        graph = make_fx(step)(torch.zeros((), dtype=torch.int64), *on_gpu, grad)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in nodes if is_cudagraph_unsafe_fx_node(node)] == [
        "megalowbit.draw_keys.default"
    ]
    captured = [node for node in nodes if "captured" in str(node.target)]
    assert len(captured) == 2
    for node in captured:
        values = [each.meta["val"] for each in node.all_input_nodes] + list(node.meta["val"])
        assert {each.device for each in values} == {GPU}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        (DRAWING, True),
        ({"split_input": {"rank": 4}}, False),
        ({"base": "quartet-2"}, False),  # draws the signs of its transform
        ({"base": "mxfp4", "gemm": "fp8"}, False),
    ],
    ids=str,
)
def test_layers_are_captured_if_only_kernels_draw(monkeypatch, change, expected):
    layer = layer_of({"base": "nvfp4", **change})
    assert not compiled.may_be_captured(layer.handle, torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(backends, "_backend_for", lambda *_: "triton")
    assert compiled.may_be_captured(layer.handle, GPU, torch.bfloat16) is expected
    assert not compiled.may_be_captured(layer.handle, GPU, torch.float64)
    monkeypatch.setattr(backends, "_backend_for", lambda *_: "torch")
    assert not compiled.may_be_captured(layer.handle, GPU, torch.bfloat16)


def test_an_observer_a_weight_cache_and_shards_stay_on_the_host():
    layer = layer_of()
    assert layer.changes_no_host_state
    layer.observer = object()
    assert not layer.changes_no_host_state
    assert layer.eval().changes_no_host_state
    layer.weight_slot = object()
    assert not layer.changes_no_host_state


def test_keys_are_those_of_an_eager_use_and_each_use_counts():
    layer, device = layer_of(DRAWING), torch.device("cpu")
    layer.random_stream.advance()
    for number in range(2):
        keys = compiled.draw_keys(layer.random_stream.step_tensor, layer.handle, device)
        expected = [layer.random_stream.key("", role, use=number).key for role in ("input", "grad_output")]
        assert keys[:, 0].tolist() == [1, 1]
        assert [each % 2**64 for each in keys[:, 1].tolist()] == expected
