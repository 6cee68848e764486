"""The autograd function of a low-bit linear layer: quantise, three GEMMs, gradients.

Forward keeps for backward the packed operands (4.5 bits an element), not the tensors they were made from;
backward decodes them again. Each tensor is quantised once with blocks along its last axis, unless the
recipe names another quantiser for backward. Only gradients somebody asked for are computed, and only what
they need is saved.

The gradient is the straight-through one: rounding counts as the identity, clipping included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalowbit.layers.gemms import column_sums, multiply
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape

OperandTensor = QuantizedTensor | UnquantizedTensor
REPORTED_ROLES = frozenset({"input", "weight", "grad_output"})
WEIGHT_ROLES = frozenset({"weight", "backward_weight"})


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one use of a layer needs beside its tensors.

    Attributes:
        recipe: quantisers of the five operands.
        compute_dtype: of the GEMMs and of the output.
        generator: (role, device) → the generator for that operand's stochastic rounding.
        observe: takes (role, counts, error) of each quantised operand; `None` counts nothing.
        is_replay: whether this forward repeats an earlier one, whose operands have been reported already.
        needs_grad: whether a graph is being recorded; without one nothing is prepared for backward.
    """

    recipe: Recipe
    compute_dtype: torch.dtype
    generator: Callable[[str, torch.device], torch.Generator]
    observe: Callable[[str, Tensor, Tensor], None] | None = None
    is_replay: bool = False
    needs_grad: bool = True

    def quantize(self, x: Tensor, name: str, role: str) -> OperandTensor:
        """Quantise one operand and report its counts; the two backward re-quantisations are not reported."""
        chosen = quantizer(name)
        is_reported = role == "grad_output" or (role in REPORTED_ROLES and not self.is_replay)
        observe = self.observe if is_reported and not chosen.is_identity else None
        generator = self.generator(role, x.device) if chosen.is_stochastic and x.numel() else None
        result = chosen.quantize(x, generator=generator, with_counts=observe is not None)
        if observe is not None and result.counts is not None and result.error is not None:
            observe(role, result.counts, result.error)
        return result


class LowbitLinear(torch.autograd.Function):
    """output = Q(input) · Q(weight)ᵀ + bias, with low-bit gradients; call `lowbit_linear`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Forward GEMM.

        Args:
            ctx: autograd's.
            input: (…, in_features).
            weight: (out_features, in_features).
            bias: (out_features,) or `None`.
            call: quantisers, dtypes and slots.

        Returns:
            (…, out_features) in `call.compute_dtype`.
        """
        recipe = call.recipe
        quantized_input = call.quantize(input, recipe.q_forward_input, "input")
        quantized_weight = call.quantize(weight, recipe.q_forward_weight, "weight")
        output = multiply(
            quantized_input,
            quantized_weight,
            transpose_right=True,
            compute_dtype=call.compute_dtype,
            out_dtype=call.compute_dtype,
            bias=bias,
        )
        if call.needs_grad:
            needs_input, needs_weight, _, _ = ctx.needs_input_grad
            saved_input = saved_weight = None
            if needs_weight:
                saved_input = _for_backward(
                    call,
                    input,
                    quantized_input,
                    recipe.q_forward_input,
                    recipe.q_backward_input,
                    "backward_input",
                )
            if needs_input:
                saved_weight = _for_backward(
                    call,
                    weight,
                    quantized_weight,
                    recipe.q_forward_weight,
                    recipe.q_backward_weight,
                    "backward_weight",
                )
            _save(ctx, saved_input, saved_weight)
            ctx.call = call
            ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return output.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, from grad_output (…, out_features)."""
        call: Call = ctx.call
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_input = grad_weight = grad_bias = None
        if needs_input or needs_weight:
            saved_input, saved_weight = _restore(ctx)
            quantized_grad = call.quantize(grad_output, call.recipe.q_backward_outputgrad, "grad_output")
            if saved_weight is not None:
                grad_input = multiply(
                    quantized_grad, saved_weight, compute_dtype=call.compute_dtype, out_dtype=input_dtype
                ).view(*grad_output.shape[:-1], saved_weight.shape[1])
            if saved_input is not None:
                grad_weight = multiply(
                    quantized_grad,
                    saved_input,
                    transpose_left=True,
                    compute_dtype=call.compute_dtype,
                    out_dtype=weight_dtype,
                )
        if needs_bias:
            grad_bias = column_sums(grad_output.reshape(matrix_shape(grad_output.shape)), bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def _for_backward(
    call: Call, x: Tensor, quantized: OperandTensor, forward_name: str, backward_name: str, role: str
) -> OperandTensor:
    return quantized if backward_name == forward_name else call.quantize(x, backward_name, role)


def _save(ctx: Any, *operands: OperandTensor | None) -> None:
    tensors: list[Tensor] = []
    ctx.operands = []  # one (rest, number of tensors) or None for each operand
    for operand in operands:
        if operand is None:
            ctx.operands.append(None)
            continue
        parts, rest = operand.to_parts()
        tensors += parts
        ctx.operands.append((rest, len(parts)))
    ctx.save_for_backward(*tensors)


def _restore(ctx: Any) -> list[OperandTensor | None]:
    tensors = list(ctx.saved_tensors)
    restored: list[OperandTensor | None] = []
    for entry in ctx.operands:
        if entry is None:
            restored.append(None)
            continue
        rest, count = entry
        parts, tensors = tensors[:count], tensors[count:]
        restored.append(rest.from_parts(tuple(parts)))
    return restored


def lowbit_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Compute input · weightᵀ + bias with the quantised operands of `call`, differentiable once.

    Args:
        input: (…, in_features), any rank from 1 on, any strides, may be empty.
        weight: (out_features, in_features).
        bias: (out_features,) or `None`.
        call: quantisers, dtypes and slots.
    """
    return LowbitLinear.apply(input, weight, bias, call)
