"""A floor of the host time of an NVFP4 layer's forward and backward: launches and torch, without the layer.

`Floor` is an autograd function that launches the kernels of a BitLinear with the recipe `nvfp4`, calls the
same operations of torch except views and `promote_types`, and saves tensors of the same sizes and dtypes. It
is written for one layer and one size, so it checks, chooses and looks up nothing. Its launches are those of a
layer that has run before. They go through launch plans, as the layer's do, or straight to the launcher of the
compiled kernel ("bare"), which takes less time. A function in C++ could take less again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megalowbit.quantize.triton import launch_arguments, launch_plans

KERNELS = [
    *["amax_kernel", "encode_kernel"] * 3,
    *["decode_kernel"] * 2,
]  # input, weight, gradient; both again
FP32, BF16 = torch.float32, torch.bfloat16
NOT_DRAWN = {"key_low": 0, "key_high": 0, "step": None, "lag": 0}
Launch = Callable[..., None]  # of one kernel, with the arguments that are not kept, by name


class LayerLaunches(NamedTuple):
    """The launches of a layer's step in their order, to be repeated with other tensors.

    Attributes:
        planned: through launch plans.
        bare: by the compiled kernels' own launcher.
    """

    planned: list[Launch]
    bare: list[Launch]


def layer_launches(step: Callable[[], None]) -> LayerLaunches | None:
    """The launches of a layer's step; earlier steps have compiled and planned its kernels.

    Returns:
        `None` where launch plans are not used: with another Triton, or on another GPU than NVIDIA's.
    """
    found, (launch, run) = LayerLaunches([], []), (launch_plans.launch_fixed, launch_plans._run)

    def keep(kernel: Any, device: torch.device, fixed: Any, given: dict[str, Any]) -> None:
        found.planned.append(partial(launch_arguments.launch_fixed, kernel, device, fixed))
        names.append([kernel.arg_names.index(name) for name in given])
        kernels.append(kernel.fn.__name__)
        launch(kernel, device, fixed, given)

    def keep_run(compiled: Any, programs: int, stream: int, values: Any) -> None:
        metadata = compiled.packed_metadata
        front = (programs, 1, 1, stream, compiled.function, metadata, None, None, None)
        found.bare.append(partial(_run, compiled.run, front, list(values), names[-1]))
        run(compiled, programs, stream, values)

    names, kernels = list[list[int]](), list[str]()
    with patch.object(launch_plans, "launch_fixed", keep), patch.object(launch_plans, "_run", keep_run):
        step()
    if kernels != KERNELS:
        raise RuntimeError(f"the layer launches other kernels than the floor: {kernels}")
    if not found.bare:
        return None
    if len(found.bare) != len(kernels):
        raise RuntimeError(f"only {len(found.bare)} of the layer's {len(kernels)} launches were planned")
    return found


def _run(run: Any, front: tuple[Any, ...], values: list[Any], places: list[int], **given: Any) -> None:
    values = values.copy()
    for place, value in zip(places, given.values(), strict=True):
        values[place] = value
    run(*front, *values)


class Floor(torch.autograd.Function):
    """A linear layer of two-dimensional bf16 tensors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, launches: list[Launch], step: Tensor
    ) -> Tensor:
        """Launches and micro-batch are those of the layer."""
        *packed_input, input = _quantized(x, launches[:2], NOT_DRAWN)
        *packed_weight, operand = _quantized(weight, launches[2:4], NOT_DRAWN)
        ctx.save_for_backward(*packed_input, *packed_weight)
        ctx.launches, ctx.step = launches[4:], step
        return torch.addmm(bias, input, operand.t())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """As the layer's, with the gradient of the bias."""
        saved, launches, step = ctx.saved_tensors, ctx.launches, ctx.step
        step.select(0, 0).fill_(1)
        drawn = {"key_low": 1, "key_high": 1, "step": step, "lag": 0}
        *_, grad = _quantized(grad_output, launches[:2], drawn)
        grad_input = torch.mm(grad, _decoded(saved[3:], launches[2]))
        grad_weight = torch.mm(grad.t(), _decoded(saved[:3], launches[3]))
        grad_bias = grad_output.sum(0, dtype=FP32)
        if grad_bias.device.type == "cpu":  # where the layer adds the sums of pieces
            grad_bias = torch.zeros(len(grad_bias), dtype=FP32).add_(grad_bias)
        return grad_input, grad_weight, grad_bias.to(BF16), None, None


def _quantized(x: Tensor, launches: list[Launch], drawn: dict[str, Any]) -> tuple[Tensor, ...]:
    """Codes, scales, tensor scale and operand."""
    (rows, cols), device = x.shape, x.device
    codes = torch.empty((rows, cols // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((rows, cols // 16), dtype=torch.float8_e4m3fn, device=device)
    tensor_scale = torch.empty((), dtype=FP32, device=device)
    operand = torch.empty((rows, cols), dtype=BF16, device=device)
    amax = torch.zeros((), dtype=FP32, device=device)
    find_maximum, encode = launches
    find_maximum(x=x, amax=amax, signs=0)
    others = {"exponents": None, "operand": operand, "counts": None, "errors": None}  # in the layer's order
    encode(x=x, amax=amax, codes=codes, scales=scales, tensor_scale=tensor_scale, **others, signs=0, **drawn)
    return codes, scales, tensor_scale, operand


def _decoded(packed: tuple[Tensor, ...], decode: Launch) -> Tensor:
    codes, scales, tensor_scale = packed
    out = torch.empty((codes.shape[0], 2 * codes.shape[1]), dtype=BF16, device=codes.device)
    decode(codes=codes.view(torch.int32), out=out, scales=scales, tensor_scale=tensor_scale)
    return out


def applied(layer: nn.Linear, launches: list[Launch]) -> Callable[[Tensor], Tensor]:
    """The floor's forward, with the parameters of a layer."""
    step = torch.zeros(2, dtype=torch.int64, device=layer.weight.device)
    return lambda x: Floor.apply(x, layer.weight, layer.bias, launches, step)
