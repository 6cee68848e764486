"""The autograd function of a low-bit linear layer: quantise, three GEMMs, gradients.

Forward keeps for backward the packed operands (4.5 bits an element), not the tensors they were made from;
backward decodes them again. Which operand is quantised along which axis is the recipe's layout; only
gradients somebody asked for are computed, and only what they need is saved.

The gradient is the straight-through one: rounding counts as the identity, clipping included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalowbit.layers import fp8_product, native_fp4
from megalowbit.layers.call import Call, Prepared, keeps_weight_codes
from megalowbit.layers.factor import Factor, exact_dtype
from megalowbit.layers.gemms import column_sums, gemm_dtype, multiply
from megalowbit.layers.recipe_checks import PRODUCTS
from megalowbit.layers.sharded_operands import Asked
from megalowbit.layers.split_product import Side, multiply_split
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape


class Forward(NamedTuple):
    """What forward returns and keeps.

    Attributes:
        output: (…, out_features).
        input: factor of grad_weight, or `None` where nobody asked for that.
        weight: factor of grad_input, or `None`.
    """

    output: Tensor
    input: Factor | None
    weight: Factor | None


def forward_products(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None, *, keeps_input: bool, keeps_weight: bool
) -> Forward:
    """Quantise, multiply, and make what backward will need.

    Args:
        call: quantisers, dtypes and slots.
        input: (…, in_features).
        weight: (out_features, in_features).
        bias: (out_features,) or `None`.
        keeps_input: whether the weight's gradient will be asked for.
        keeps_weight: whether the input's gradient will be asked for.
    """
    recipe = call.recipe
    ready = _ready_dtype(call, "output", input.device)
    prepared = call.prepare(input, "input")
    prepare_weight = functools.lru_cache(maxsize=1)(lambda: call.prepare(weight, "weight"))  # once, if at all
    call.agree_on(lambda: _asked_forward(call, input, weight, keeps_input, keeps_weight))
    x = call.quantize(prepared, recipe.q_forward_input, "input", operand_dtype=ready)
    w = call.weight(
        weight,
        recipe.q_forward_weight,
        "weight",
        lambda: call.quantize(prepare_weight(), recipe.q_forward_weight, "weight", operand_dtype=ready),
    )
    sums_output = call.shards is not None and call.shards.is_row
    own_bias = None if sums_output else bias
    output = _product(call, "output", x, w, transpose_right=True, out_dtype=call.compute_dtype, bias=own_bias)
    if call.shards is not None and sums_output:
        output = call.shards.sum_output(output, bias)
    return Forward(
        output.view(*input.shape[:-1], weight.shape[0]),
        _input_for_backward(call, prepared, x) if keeps_input else None,
        _weight_for_backward(call, weight, prepare_weight, w) if keeps_weight else None,
    )


def _asked_forward(
    call: Call, input: Tensor, weight: Tensor, keeps_input: bool, keeps_weight: bool
) -> list[Asked]:
    """What forward will quantise, but for weights in the cache, which are there on all ranks or on none."""
    recipe, is_per_gemm = call.recipe, call.recipe.layout == "per_gemm"
    asked = [Asked("input", input, recipe.q_forward_input)]
    if keeps_input and (is_per_gemm or recipe.q_backward_input != recipe.q_forward_input):
        signs = call.signs if is_per_gemm else None
        asked.append(Asked("backward_input", input, recipe.q_backward_input, is_per_gemm, signs))
    weights = [Asked("weight", weight, recipe.q_forward_weight)]
    if keeps_weight and not keeps_weight_codes(recipe):
        weights.append(Asked("backward_weight", weight, recipe.q_backward_weight, is_per_gemm))
    return asked + [each for each in weights if call.needs_weight(weight, each.name, each.role)]


def _asked_backward(call: Call, grad_output: Tensor, has_grad: bool, has_transposed: bool) -> list[Asked]:
    """What backward will quantise."""
    name = call.recipe.q_backward_outputgrad
    asked = [Asked("grad_output", grad_output, name)] if has_grad else []
    if has_transposed:
        asked.append(Asked("grad_output_transposed", grad_output, name, True, call.signs))
    return asked


def _input_for_backward(call: Call, input: Prepared, forward: Factor) -> Factor:
    name = call.recipe.q_backward_input
    if call.recipe.layout == "per_gemm":
        return call.quantize_transposed(input, name, "backward_input", is_transformed=True)
    if name == call.recipe.q_forward_input:
        return forward.packed()
    return call.quantize(input, name, "backward_input")


def _weight_for_backward(
    call: Call, weight: Tensor, prepare: Callable[[], Prepared], forward: Factor
) -> Factor:
    recipe = call.recipe
    if keeps_weight_codes(recipe):
        return forward.packed()
    name, role = recipe.q_backward_weight, "backward_weight"

    def quantize() -> Factor:
        if recipe.layout == "per_gemm":
            return call.quantize_transposed(prepare(), name, role, is_transformed=False)
        return call.quantize(prepare(), name, role)

    return call.weight(weight, name, role, quantize).packed()


class Dtypes(NamedTuple):
    """Dtypes of what is differentiated; a gradient has the dtype of its tensor."""

    input: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None


def backward_products(
    call: Call,
    grad_output: Tensor,
    input: Factor | None,
    weight: Factor | None,
    *,
    in_features: int,
    dtypes: Dtypes,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias.

    Args:
        call: that of the forward.
        grad_output: (…, out_features).
        input: as `Forward.input`.
        weight: as `Forward.weight`.
        in_features: of the layer.
        dtypes: of the gradients.
        needs_bias: whether the bias's gradient is asked for.
    """
    recipe, grad_input, grad_weight, grad_bias = call.recipe, None, None, None
    name, has_own_copy = recipe.q_backward_outputgrad, recipe.layout == "per_gemm"
    grad: Factor | None = None
    grad_t: Factor | None = None
    prepared = Prepared(grad_output)
    if weight is not None or input is not None:
        prepared = call.prepare(grad_output, "grad_output")
    has_grad = weight is not None or (input is not None and not has_own_copy)
    has_transposed = input is not None and has_own_copy
    call.agree_on(lambda: _asked_backward(call, grad_output, has_grad, has_transposed))
    if has_grad:
        ready = _ready_dtype(call, "grad_input", grad_output.device)
        grad = call.quantize(prepared, name, "grad_output", operand_dtype=ready)
    if has_transposed:
        reported = "grad_output" if grad is None else None
        grad_t = call.quantize_transposed(
            prepared, name, "grad_output_transposed", is_transformed=True, reported_as=reported
        )
    else:
        grad_t = grad
    if recipe.gemm == "fp8" and call.compute_dtype != torch.float64:  # one host read for both products
        fp8_product.measure_products((grad, weight), (grad_t, input))
    if weight is not None:
        assert grad is not None  # made above
        grad_input = _product(call, "grad_input", grad, weight, out_dtype=dtypes.input)
        grad_input = grad_input.view(*grad_output.shape[:-1], in_features)
    summing = None if call.shards is None else call.shards.start_sum_grad_input(grad_input)
    if input is not None:
        assert grad_t is not None  # made above
        grad_weight = _product(
            call, "grad_weight", grad_t, input, transpose_left=True, out_dtype=dtypes.weight
        )
    if needs_bias and dtypes.bias is not None:
        grad_bias = column_sums(grad_output.reshape(matrix_shape(grad_output.shape)), dtypes.bias)
    if summing is not None:  # it went on beside the other products
        summing.wait()
    return grad_input, grad_weight, grad_bias


def _ready_dtype(call: Call, product: str, device: torch.device) -> torch.dtype | None:
    """The dtype a product's operands are needed in: quantisers make them on the way. `None`: packed."""
    if call.recipe.gemm != "bf16":
        return None
    return gemm_dtype(
        [exact_dtype(getattr(call.recipe, field)) for field in PRODUCTS[product]], call.compute_dtype, device
    )


def _product(
    call: Call,
    product: str,
    left: Factor,
    right: Factor,
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """One product, of split operands too; transposes are of the tensors that the factors stand for."""
    gemm = functools.partial(
        _gemm, call, product, transpose_left=transpose_left, transpose_right=transpose_right
    )
    if left.low_rank is None and right.low_rank is None:
        return gemm(left, right, out_dtype=out_dtype, bias=bias)
    left, right = _decoded(call, left, right)
    is_transformed = product == "grad_weight" and call.recipe.hadamard
    return multiply_split(
        lambda wide_dtype, bias: gemm(left, right, out_dtype=wide_dtype, bias=bias),
        Side(left, transpose_left),
        Side(right, transpose_right),
        compute_dtype=call.compute_dtype,
        out_dtype=out_dtype,
        bias=bias,
        signs=call.hadamard_signs if is_transformed else None,
    )


def _decoded(call: Call, left: Factor, right: Factor) -> tuple[Factor, Factor]:
    """The residuals with their operands made, which the thin products need as well as the GEMM."""
    if call.recipe.gemm != "bf16":
        return left, right
    tensors = left.tensor, right.tensor
    exact = [tensor.exact_dtype for tensor in tensors]
    device = (left.low_rank or right.low_rank).values.device  # type: ignore[union-attr]  # one of them is split
    dtype = gemm_dtype(exact, call.compute_dtype, device)
    made = [
        replace(tensor, ready_operand=tensor.operand(dtype))
        if isinstance(tensor, QuantizedTensor)
        else tensor
        for tensor in tensors
    ]
    return replace(left, tensor=made[0]), replace(right, tensor=made[1])


def _gemm(
    call: Call,
    product: str,
    left: Factor,
    right: Factor,
    *,
    transpose_left: bool,
    transpose_right: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """One GEMM of what two factors hold, in what the recipe asks for."""
    transpose_left, transpose_right = (
        transpose_left != left.is_transposed,
        transpose_right != right.is_transposed,
    )
    result, path = None, call.recipe.gemm
    if path == "fp8" and call.compute_dtype != torch.float64:
        result = fp8_product.multiply(
            left,
            right,
            transpose_left=transpose_left,
            transpose_right=transpose_right,
            out_dtype=out_dtype,
            bias=bias,
        )
    elif path == "fp4":
        result = native_fp4.multiply(
            left,
            right,
            transpose_left=transpose_left,
            transpose_right=transpose_right,
            out_dtype=out_dtype,
            bias=bias,
        )
    if result is None:
        path = "bf16"
        result = multiply(
            left.tensor,
            right.tensor,
            transpose_left=transpose_left,
            transpose_right=transpose_right,
            compute_dtype=call.compute_dtype,
            out_dtype=out_dtype,
            bias=bias,
        )
    if call.count is not None:
        call.count(product, path)
    return result


class LowbitLinear(torch.autograd.Function):
    """output = Q(input) · Q(weight)ᵀ + bias, with low-bit gradients; call `lowbit_linear`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """See `lowbit_linear`."""
        needs_input, needs_weight, _, _ = ctx.needs_input_grad
        result = forward_products(
            call,
            input,
            weight,
            bias,
            keeps_input=call.needs_grad and needs_weight,
            keeps_weight=call.needs_grad and needs_input,
        )
        if call.needs_grad:
            _save(ctx, result.input, result.weight)
            ctx.call, ctx.in_features = call, weight.shape[1]
            ctx.dtypes = Dtypes(input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return result.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, from grad_output (…, out_features)."""
        saved_input, saved_weight = _restore(ctx)
        gradients = backward_products(
            ctx.call,
            grad_output,
            saved_input,
            saved_weight,
            in_features=ctx.in_features,
            dtypes=ctx.dtypes,
            needs_bias=ctx.needs_input_grad[2],
        )
        return *gradients, None


def _save(ctx: Any, *factors: Factor | None) -> None:
    tensors: list[Tensor] = []
    ctx.factors = []  # one (rest, number of tensors) or None for each factor
    for factor in factors:
        if factor is None:
            ctx.factors.append(None)
            continue
        parts, rest = factor.to_parts()
        tensors += parts
        ctx.factors.append((rest, len(parts)))
    ctx.save_for_backward(*tensors)


def _restore(ctx: Any) -> list[Factor | None]:
    tensors = list(ctx.saved_tensors)
    restored: list[Factor | None] = []
    for entry in ctx.factors:
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

    Returns:
        (…, out_features) in `call.compute_dtype`.
    """
    return LowbitLinear.apply(input, weight, bias, call)
