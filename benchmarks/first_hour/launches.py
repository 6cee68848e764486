"""Step 11: what a layer costs the host, and whether a CUDA graph can capture it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, expect, info, skip
from benchmarks.first_hour.session import NO_GPU, Session
from megalowbit.quantize.random_stream import RandomStream

RECIPES: dict[str, Any] = {
    "nvfp4": "nvfp4",
    "mxfp4, FP8 products": {"base": "mxfp4", "name": "fp8", "gemm": "fp8"},
    "metis-nvfp4": "metis-nvfp4",
}
ADDED_MILLISECONDS = (0.30, 0.60)  # to `nn.Linear`, by forward and backward: goal and limit
WARM_UPS, REPLAYS = 3, 3
SIZES = (256, 512, 384)  # tokens, in_features, out_features
TOLERANCE = 1e-2  # relative norm: a GEMM in a graph may sum in another order


class Result(NamedTuple):
    """Output, and gradients of input and weight, of one micro-batch."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor


def check(session: Session) -> Iterator[Finding]:
    """Host time with launch plans against Triton's launcher; results of a captured layer."""
    if not session.is_gpu:
        yield skip("host time that a layer adds to nn.Linear", NO_GPU)
        yield skip("the layer with launch plans ÷ with Triton's launcher, host time", NO_GPU)
        yield skip("a captured forward and backward = the eager one", NO_GPU)
        for name, recipe in RECIPES.items():
            yield copies(name, recipe)
        return
    from benchmarks.launch_overhead import overhead  # needs Triton

    goal, limit = ADDED_MILLISECONDS
    for name, recipe in RECIPES.items():
        found = overhead(recipe, session.device, rounds=11)
        added = 1e3 * (found.planned - found.plain)
        note = f"{found.launches} launches, {found.operations} operations"
        yield at_most(f"host time added to nn.Linear, {name}", added, limit, " ms", warn=goal, note=note)
        title = f"added with launch plans ÷ with Triton's launcher, {name}"
        yield skip(title, "its rounds differ too much") if found.is_noisy else info(title, found.ratio, " ×")
        if found.floor is not None:
            yield info(f"host time ÷ floor, {name}", found.floor.ratio, " ×")
        elif name == "nvfp4":  # the only one with a floor
            yield skip(f"host time ÷ floor, {name}", "launch plans are not used here")
    for name, recipe in RECIPES.items():
        yield from graph(name, recipe)


def twins(recipe: Any, device: str) -> tuple[Callable[[], Result], Callable[[], Result]]:
    """Two copies of a layer that run the same micro-batches."""
    torch.manual_seed(1)
    layer = mlb.BitLinear(*SIZES[1:], recipe=recipe, device=device, dtype=torch.bfloat16)
    layer.layer_name = "layer"
    x = torch.randn(SIZES[0], SIZES[1], device=device).bfloat16().requires_grad_()
    grad = torch.randn(SIZES[0], SIZES[2], device=device).bfloat16()
    twin = copy.deepcopy(layer)
    return micro_batch_of(layer, x, grad), micro_batch_of(twin, x.detach().clone().requires_grad_(), grad)


def copies(name: str, recipe: Any) -> Finding:
    """Whether two copies draw the same numbers in each micro-batch: replays are compared with such a copy."""
    one, other = twins(recipe, "cpu")
    pairs = [pair for _ in range(REPLAYS) for pair in zip(one(), other(), strict=True)]
    is_same = all(torch.equal(*pair) for pair in pairs)
    return expect(f"two copies of {name} have the same bits", is_same, is_same, "equal tensors")


def graph(name: str, recipe: Any) -> Iterator[Finding]:
    """Replays of a captured micro-batch against the same micro-batches of an eager copy."""
    captured, eager = twins(recipe, "cuda")
    expected = [eager() for _ in range(WARM_UPS + REPLAYS)][WARM_UPS:]
    try:
        found = replays(captured)
    except Exception as error:  # of the driver, torch or Triton: there is no common class
        note = " ".join(str(error).split())[:200]
        yield expect(f"a CUDA graph of {name}", False, type(error).__name__, "captured", note=note)
        return
    pairs = [pair for one in zip(found, expected, strict=True) for pair in zip(*one, strict=True)]
    worst = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
    yield at_most(f"replays of {name}, distance from the eager layer", worst, TOLERANCE, " relative")
    is_fresh = not torch.equal(found[0].grad_input, found[1].grad_input)
    yield expect(f"replays of {name} draw new numbers", is_fresh, is_fresh, "other gradients each time")


def micro_batch_of(layer: mlb.BitLinear, x: Tensor, grad: Tensor) -> Callable[[], Result]:
    """Runs one micro-batch; the results are new tensors, in a graph those that replays overwrite."""
    stream = layer.random_stream = RandomStream(0, 0)

    def run() -> Result:
        stream.advance()
        x.grad = layer.weight.grad = None
        if isinstance(layer.bias, nn.Parameter):
            layer.bias.grad = None
        output = layer(x)
        output.backward(grad)
        assert x.grad is not None  # by the line above
        assert layer.weight.grad is not None
        return Result(output.detach(), x.grad, layer.weight.grad)

    return run


def replays(run: Callable[[], Result]) -> list[Result]:
    """Warm up, capture one micro-batch, and replay it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = run()
    found = []
    for _ in range(REPLAYS):
        captured.replay()
        found.append(Result(*(each.clone() for each in result)))
    torch.cuda.synchronize()
    return found
