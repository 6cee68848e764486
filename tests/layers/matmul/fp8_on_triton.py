"""FP8 products where Triton's kernels decide whether they fit: `python fp8_on_triton.py cpu layer`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import copy
import sys
from functools import partial

import pytest
import torch
from fp8_operands import spread_matrix
from host_reads import HostReads
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.kernels import launches
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert, product_counts, random_stream
from megalowbit.layers.matmul.fp8 import DTYPES
from megalowbit.quantize import backends, reference
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments

LAYER = torch.ops.megalowbit.linear.default
FORWARD = ["fp4.encode_kernel", "fp8.decode_kernel"] * 2 + ["fp8.product_kernel"]
TRANSPOSED = ["fp8.decode_kernel", "fp8.product_kernel"]
BACKWARD = {
    "single_copy": [
        *("fp4.encode_kernel", "fp8.decode_kernel", *TRANSPOSED),  # grad_output, and weight transposed
        *("fp8.decode_kernel", *TRANSPOSED),  # grad_output and input, transposed
    ],
    "per_gemm": [
        *("fp4.encode_kernel", "fp8.decode_kernel", "fp4.encode_kernel"),  # grad_output and its transpose
        *TRANSPOSED,
        *("fp8.decode_kernel", *TRANSPOSED),
    ],
}


def check_stream(stream):
    """The check that a stream makes at its first use, without launches: they are slow in the interpreter."""
    stream.check(torch.device("cpu"), reference.encode)


def made(gemm, layout, weight):
    layer = BitLinear(64, 32, bias=False, recipe={"base": "mxfp4", "gemm": gemm, "layout": layout})
    layer.random_stream = RandomStream(1)
    check_stream(layer.random_stream)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def trained(layer, x, grad):
    x, layer.weight.grad = x.clone().requires_grad_(), None
    output = layer(x)
    output.backward(grad)
    return output.detach(), x.grad, layer.weight.grad


def check_layer(*layouts):
    """Bits of the bf16 recipe, no host read, and the launches that there have to be."""
    x, weight, grad = tensors()
    for layout in layouts:
        expected, layer = trained(made("bf16", layout, weight), x, grad), made("fp8", layout, weight)
        launched, launch = [], launch_arguments.launch

        def noted(kernel, *arguments, launched=launched, launch=launch, **named):
            launched.append(launches.name_of(kernel))
            launch(kernel, *arguments, **named)

        with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads, launches.launching(noted):
            got = trained(layer, x, grad)
        assert not reads.places
        own = ["fp4.encode_kernel"] * 2 if layout == "per_gemm" else []  # operands of backward
        assert launched == [*FORWARD, *own, *BACKWARD[layout]], launched
        assert layer.product_counts == {name: {"fp8": 1} for name in DTYPES}
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def check_far_layer():
    """Products of a layer whose input does not fit are right and counted."""
    x, weight, grad = tensors()
    layer, expected = made("fp8", "single_copy", weight), made("bf16", "single_copy", weight)
    x[:, :32] *= 2.0**-20
    for one, other in zip(trained(layer, x, grad), trained(expected, x, grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
    assert layer.product_counts["output"] == {"bf16": 1} == layer.product_counts["grad_weight"]
    assert layer.product_counts["grad_input"] == {"fp8": 1}
    layer(x[:, 32:].repeat(1, 2))
    assert layer.product_counts["output"] == {"bf16": 1, "fp8": 1}


def tensors():
    return (
        spread_matrix(48, 64, [0, -1, 2]),
        spread_matrix(32, 64, [-3, 0], 1),
        spread_matrix(48, 32, [-4, 1], 2),
    )


def two_layers(is_near):
    """A model whose second input fits, or not; and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    with torch.no_grad():
        model[0].weight[:, :32] *= 1.0 if is_near else 2.0**-20
    convert(model, {"base": "mxfp4", "gemm": "fp8"}, seed=3)
    check_stream(random_stream(model))
    return model, torch.randn(32, 64, requires_grad=True)


def results(model, x, forward, backwards=1):
    """Output and gradients; further backward passes add what the first one did."""
    output = forward(model, x)
    for each in range(backwards):
        output.square().sum().backward(retain_graph=each + 1 < backwards)
    return [output.detach(), *(each.grad / backwards for each in (x, *model.parameters()))]


def check_ways():
    """Compiled, checkpointed and repeated passes have the bits of the plain one, and count what they ran."""
    ways = {
        "compiled": lambda model, x: torch.compile(model, fullgraph=True, backend="aot_eager")(x),
        "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
        "checkpointed, reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
        "selective": lambda model, x: checkpoint(
            model, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [LAYER])
        ),
        "graph kept": lambda model, x: model(x),
    }
    for is_near in (True, False):
        model, x = two_layers(is_near)
        expected, counts = results(model, x, lambda model, x: model(x)), product_counts(model)
        assert counts["output"] == ({"fp8": 2} if is_near else {"fp8": 1, "bf16": 1})
        for name, forward in ways.items():
            model, x = two_layers(is_near)
            got = results(model, x, forward, backwards=2 if name == "graph kept" else 1)
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other), name
            found = product_counts(model)["output"]
            times = 2 if name.startswith("checkpointed") else 1
            assert found == {path: times * count for path, count in counts["output"].items()}, (name, found)
        assert product_counts(copy.deepcopy(model)) == product_counts(model)


def main():
    assert backends.backend_of(torch.zeros(1)) == "triton"
    group = sys.argv[2]
    if group == "layer":
        check_layer("single_copy")
    elif group == "ways":
        check_ways()
    else:
        check_layer("per_gemm")
        check_far_layer()
    print("equal")


if __name__ == "__main__":
    main()
