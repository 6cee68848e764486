"""The kernels of a layer's forward and backward, as `counting` counts them."""

from __future__ import annotations

import torch
from torch import Tensor

import megalowbit as mlb
from benchmarks.kernels.counting import GPU, Kernel, counting
from megalowbit.layers.matmul.context import MatmulContext, Observe
from megalowbit.layers.matmul.function import Dtypes, backward_products, forward_products
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments
from megalowbit.spectral.state import SplitState


def layer_kernels(
    chosen: mlb.Recipe, sizes: tuple[int, int, int], observe: Observe | None = None
) -> list[Kernel]:
    """The kernels of a layer's second micro-batch; `observe` gets its counts, as that of an observer."""
    states: dict[str, SplitState] = {}
    stream = RandomStream(0)
    with counting() as gpu:
        for _ in range(2):
            stream.advance()
            launch_arguments.random_arguments(stream.key("any", "input"), GPU)  # once for all layers
            gpu.kernels.clear()
            run_layer(chosen, sizes, stream, states, observe)
    return gpu.kernels


def run_layer(
    chosen: mlb.Recipe,
    sizes: tuple[int, int, int],
    stream: RandomStream,
    states: dict[str, SplitState],
    observe: Observe | None = None,
) -> None:
    """Forward and backward on matrices of these sizes, on the device that tensors of `GPU` have."""
    x, w, g = matrices(*sizes)
    context = MatmulContext(
        recipe=chosen,
        compute_dtype=torch.bfloat16,
        random_key=lambda role, _device: stream.key("layer", role),
        hadamard_signs=1,
        step=stream.step,
        sizes=sizes[1:],
        observe=observe,
        split_state=lambda role: states.setdefault(role, SplitState()),
    )
    done = forward_products(context, x, w, None, keeps_input=True, keeps_weight=True)
    dtypes = Dtypes(torch.bfloat16, torch.bfloat16, None)
    assert done.input is not None  # requested, as is the weight
    assert done.weight is not None
    kept = done.input.packed(), done.weight.packed()
    backward_products(context, g, *kept, in_features=sizes[1], dtypes=dtypes, needs_bias=False)


def plain_layer(tokens: int, inputs: int, outputs: int) -> list[Kernel]:
    """The kernels of the three products of a bf16 layer."""
    with counting() as gpu:
        x, w, g = matrices(tokens, inputs, outputs)
        x @ w.t(), g @ w, g.t() @ x
    return gpu.kernels


def matrices(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and output gradient."""
    shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    x, w, g = (torch.empty(each, dtype=torch.bfloat16, device=GPU) for each in shapes)
    return x, w, g
