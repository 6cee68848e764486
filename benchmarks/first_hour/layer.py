"""Step 4: forward and backward of one layer against a bf16 `nn.Linear`: time, results, kernels, host time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, expect, info, skip
from benchmarks.first_hour.session import NO_GPU, Session
from benchmarks.timing import ratio
from megalowbit.quantize.random_stream import RandomStream

GPU_SHAPES = ((8192, 4096, 4096), (8192, 4096, 11008), (8192, 11008, 4096))  # tokens, in, out: LLaMA 7B
CPU_SHAPES = ((128, 64, 96),)
TOLERANCE = 1e-2  # relative norm: sums in another order, and one rounding to bf16
SPLIT_TOLERANCE = 0.2
PEER = "nn.Linear"


class Goal(NamedTuple):
    """Time over that of bf16: the goal, and from where on it is a defect."""

    recipe: Any
    goal: float
    limit: float
    has_telemetry: bool = False


RECIPES = {
    "nvfp4": Goal("nvfp4", 1.15, 1.8),
    "nvfp4, counting": Goal("nvfp4", 1.15, 2.1, has_telemetry=True),
    "nvidia-nvfp4": Goal("nvidia-nvfp4", 1.3, 2.1),
    "metis-nvfp4": Goal("metis-nvfp4", 1.3, 4),
    "mxfp4": Goal("mxfp4", 1.25, 1.6),
    "mxfp4, FP8 products": Goal({"base": "mxfp4", "name": "fp8", "gemm": "fp8"}, 0.80, 1.3),
    "nvfp4, rank 60": Goal({"base": "nvfp4", "name": "split", "split_grad_output": {"rank": 60}}, 1.30, 4),
}
# launches of forward and backward with a bias, those of autograd included
MOST_KERNELS = {"nvfp4": 24, "nvfp4, counting": 36, "mxfp4, FP8 products": 28, "nvfp4, rank 60": 44}
HOST_MILLISECONDS = (0.6, 1.2)  # goal and limit at 64 × 64 × 64


def check(session: Session) -> Iterator[Finding]:
    """Times by shape, results against the CPU's, launches of one step, and the host's share."""
    for shape in session.size(GPU_SHAPES, CPU_SHAPES):
        yield from speed(session, shape)
    yield from results(session)
    yield from launches(session)
    small = step_of(make(RECIPES["nvfp4"], (64, 64, 64), session.device), (64, 64, 64))
    milliseconds = session.host_seconds(small, 20) * 1e3
    if session.is_gpu:
        goal, limit = HOST_MILLISECONDS
        yield at_most("host time at 64 × 64 × 64", milliseconds, limit, " ms", warn=goal)
    else:
        yield info("host time at 64 × 64 × 64", milliseconds, " ms", note="with the arithmetic, on a CPU")


def make(goal: Goal, shape: tuple[int, int, int], device: str) -> mlb.BitLinear:
    """A layer of a recipe."""
    layer = mlb.BitLinear(*shape[1:], recipe=goal.recipe, device=device, dtype=torch.bfloat16)
    layer.observer = mlb.GradientOverflowTracker() if goal.has_telemetry else None
    return layer


def step_of(layer: nn.Module, shape: tuple[int, int, int]) -> Callable[[], None]:
    """Forward and backward on fixed random data."""
    device = next(layer.parameters()).device
    x = torch.randn(shape[0], shape[1], device=device).bfloat16().requires_grad_()
    grad = torch.randn(shape[0], shape[2], device=device).bfloat16()

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        if getattr(layer, "observer", None) is not None:
            layer.observer.begin_step()
        layer(x).backward(grad)

    return step


def speed(session: Session, shape: tuple[int, int, int]) -> Iterator[Finding]:
    """Every recipe over the plain layer, interleaved."""
    tokens, inputs, outputs = shape
    plain = nn.Linear(inputs, outputs, device=session.device, dtype=torch.bfloat16)
    layers: dict[str, nn.Module] = {name: make(goal, shape, session.device) for name, goal in RECIPES.items()}
    times = session.time({name: step_of(layer, shape) for name, layer in {PEER: plain, **layers}.items()})
    size = f"{tokens} × {inputs} → {outputs}"
    for name, goal in RECIPES.items():
        value, state = ratio(times, name, PEER), times.state(name)
        here, peer = (median(times[each]) * 1e3 for each in (name, PEER))
        note = f"{here:.3f} ms, bf16 {peer:.3f} ms (medians)"
        if session.is_gpu:
            yield at_most(
                f"{name}, {size}", value, goal.limit, " × bf16", warn=goal.goal, note=note, state=state
            )
        else:
            yield info(f"{name}, {size}", value, " × bf16", note=note)
    counts = layers["mxfp4, FP8 products"].product_counts
    paths = sorted({path for product in counts.values() for path in product})
    if session.is_gpu and torch.cuda.get_device_capability() >= (8, 9):
        yield expect(f"products in FP8, {size}", paths == ["fp8"], ", ".join(paths), "fp8")
    else:
        yield info(f"products in FP8, {size}", ", ".join(paths))


def results(session: Session) -> Iterator[Finding]:
    """Output and gradients on the GPU against those of the same layer on the CPU."""
    if not session.is_gpu:
        yield skip("output and gradients = the CPU's", NO_GPU)
        return
    shape = (256, 512, 384)
    for name, goal in RECIPES.items():
        torch.manual_seed(1)
        here = make(goal._replace(has_telemetry=False), shape, "cpu")
        there = copy.deepcopy(here).cuda()
        for layer in (here, there):
            layer.layer_name, layer.random_stream = "layer", RandomStream(0, 0)
        x, grad = torch.randn(shape[0], shape[1]).bfloat16(), torch.randn(shape[0], shape[2]).bfloat16()
        pairs = zip(tensors_of(there, x.cuda(), grad.cuda()), tensors_of(here, x, grad), strict=True)
        worst = max(float((a.cpu().double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
        # the factors of a split depend on the order of sums, and numbers near a tie then round the other way
        limit = SPLIT_TOLERANCE if here.recipe.name in ("split", "metis-nvfp4") else TOLERANCE
        yield at_most(f"{name}: output and gradients, distance from the CPU's", worst, limit, " relative")


def tensors_of(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    return [output.detach(), *(each.grad for each in (x, layer.weight, layer.bias))]


def launches(session: Session) -> Iterator[Finding]:
    """Kernels of a step, by the profiler, and how long copies and scalings after products take."""
    if not session.is_gpu:
        yield skip("kernels of forward and backward", NO_GPU)
        return
    shape = GPU_SHAPES[0]
    for name, limit in MOST_KERNELS.items():
        step = step_of(make(RECIPES[name], shape, session.device), shape)
        for _ in range(3):
            step()
        with torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(session.folder / f"layer-{name.replace(', ', '-')}.json"))
        kernels = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        yield at_most(f"kernels of {name}", len(kernels), limit, " kernels")
        words = ("elementwise", "copy", "Memcpy")
        passes = [each for each in kernels if any(word in each.name for word in words)]
        microseconds = sum(each.device_time for each in passes)
        total = sum(each.device_time for each in kernels)
        yield info(
            f"copies and scalings of {name}", microseconds, " µs", note=f"of {total:.0f} µs in kernels"
        )
