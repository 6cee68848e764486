"""Steps of a compiled model with operators for CUDA graphs, bit for bit those of an eager one.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import json
import sys
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import megalowbit as mlb
from megalowbit.layers import compiled


def model_of(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    mlb.convert(model, recipe, seed=3)
    return model


def gradients_of(model, run, count=3):
    """Outputs and gradients of steps with the same input, and the micro-batch after them."""
    found = []
    for _ in range(count):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = run(x)
        output.square().sum().backward()
        found += [output.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]
        model.zero_grad()
    return found, mlb.random_stream(model).step


def is_always_captured(*_):
    return True


def names_of(graphs):
    return {str(node.target) for graph in graphs for node in graph.graph.nodes}


def main(recipe):
    graphs = []

    def recording(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=recording, bw_compiler=recording)
    model = model_of(recipe)
    expected = gradients_of(model, model)
    constant = torch.compiler.assume_constant_result(is_always_captured)
    with patch.object(compiled, "may_be_captured", constant):
        model = model_of(recipe)
        found = gradients_of(model, torch.compile(model, fullgraph=True, backend=backend))
    assert {"megalowbit.captured_linear.default", "megalowbit.captured_linear_backward.default"} <= names_of(
        graphs
    )
    assert not {"megalowbit.linear.default", "megalowbit.linear_backward.default"} & names_of(graphs)
    assert found[1] == expected[1] == 3
    assert all(map(torch.equal, found[0], expected[0]))
    per_step = len(found[0]) // 3
    assert not torch.equal(found[0][1], found[0][1 + per_step])  # the same input, other numbers
    print("equal")


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
