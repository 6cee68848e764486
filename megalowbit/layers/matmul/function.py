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

from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.matmul.context import Call, Prepared, keeps_weight_codes
from megalowbit.layers.matmul.gemms import column_sums, gemm_dtype, multiply
from megalowbit.layers.matmul.operand import Factor, exact_dtype, restore_factors, save_factors
from megalowbit.layers.matmul.sharded_operands import Asked
from megalowbit.layers.matmul.split import Side, multiply_split
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe_checks import operand_quantizers
from megalowbit.quantize.names import quantizer
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
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: WeightFactors | None = None,
    *,
    keeps_input: bool,
    keeps_weight: bool,
) -> Forward:
    """Quantise, multiply, and make what backward will need.

    Args:
        call: quantisers, dtypes and slots.
        input: (…, in_features).
        weight: (out_features, in_features); W_R of a weight split into parameters.
        bias: (out_features,) or `None`.
        factors: of a weight split into parameters; they are not part of what is kept.
        keeps_input: whether the weight's gradient, or that of a factor, will be asked for.
        keeps_weight: whether the input's gradient will be asked for.
    """
    recipe = call.recipe
    ready = _ready_dtype(call, "output", input.device)
    prepared = call.prepare(input, "input")
    prepare_weight = functools.cache(lambda: call.prepare(weight, "weight")._replace(factors=factors))
    call.agree_on(lambda: _asked_forward(call, input, weight, keeps_input, keeps_weight))
    call.look(input=input, weight=weight)
    x = call.quantize(prepared, recipe.q_forward_input, "input", operand_dtype=ready)
    w = call.weight(
        weight,
        recipe.q_forward_weight,
        "weight",
        lambda: call.quantize(prepare_weight(), recipe.q_forward_weight, "weight", operand_dtype=ready),
    )
    sums_output = call.shards is not None and call.shards.is_row
    own_bias = None if sums_output else bias
    whole, dtype = w if factors is None else factors.beside(w), call.compute_dtype
    output = _product(call, "output", x, whole, transpose_right=True, out_dtype=dtype, bias=own_bias)
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


def _asked_backward(call: Call, grad_output: Tensor, has_grad: bool, has_own: bool) -> list[Asked]:
    """What backward will quantise."""
    recipe = call.recipe
    asked = [Asked("grad_output", grad_output, recipe.q_backward_outputgrad)] if has_grad else []
    if has_own and recipe.layout == "per_gemm":
        name = recipe.q_backward_outputgrad
        asked.append(Asked("grad_output_transposed", grad_output, name, True, call.signs))
    elif has_own:
        asked.append(Asked("grad_output_for_weight", grad_output, recipe.outputgrad_for_weight))
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
    factors: WeightFactors | None = None,
    *,
    in_features: int,
    dtypes: Dtypes,
    needs_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias; then, of a weight split into parameters, those of U, S and V.

    Args:
        call: that of the forward.
        grad_output: (…, out_features).
        input: as `Forward.input`.
        weight: as `Forward.weight`.
        factors: as for `forward_products`.
        in_features: of the layer.
        dtypes: of the gradients.
        needs_bias: whether the bias's gradient is asked for.
    """
    grad_input = grad_weight = grad_bias = None
    grad, grad_t = _quantised_gradient(call, grad_output, weight is not None, input is not None)
    if call.recipe.gemm == "fp8" and call.compute_dtype != torch.float64:  # one host read for both products
        fp8_product.measure_products((grad, weight), (grad_t, input))
    if weight is not None:
        assert grad is not None  # made above
        whole = weight if factors is None else factors.beside(weight)
        grad_input = _product(call, "grad_input", grad, whole, out_dtype=dtypes.input)
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
    if factors is None:
        return grad_input, grad_weight, grad_bias
    of_factors = (None,) * 3 if grad_weight is None else factors.gradients(grad_weight, call.compute_dtype)
    return grad_input, grad_weight, grad_bias, *of_factors


def _quantised_gradient(
    call: Call, grad_output: Tensor, has_weight: bool, has_input: bool
) -> tuple[Factor | None, Factor | None]:
    """The output gradient as grad_input and as grad_weight multiply it, as far as they are asked for."""
    recipe = call.recipe
    name, own_name = recipe.q_backward_outputgrad, recipe.outputgrad_for_weight
    if not has_weight and not has_input:
        return None, None
    prepared = call.prepare(grad_output, "grad_output")
    has_own = has_input and (recipe.layout == "per_gemm" or own_name != name)
    has_grad = has_weight or not has_own
    call.agree_on(lambda: _asked_backward(call, grad_output, has_grad, has_own))
    call.look(grad_output=grad_output)
    grad: Factor | None = None
    if has_grad:
        ready = _ready_dtype(call, "grad_input", grad_output.device)
        grad = call.quantize(prepared, name, "grad_output", operand_dtype=ready)
    if not has_own:
        return grad, grad
    # The observer hears of it once, and never of what is left as it is.
    reported = "grad_output" if grad is None or quantizer(name).is_identity else None
    if recipe.layout == "per_gemm":
        return grad, call.quantize_transposed(
            prepared, name, "grad_output_transposed", is_transformed=True, reported_as=reported
        )
    ready = _ready_dtype(call, "grad_weight", grad_output.device)
    role = "grad_output_for_weight"
    return grad, call.quantize(prepared, own_name, role, operand_dtype=ready, reported_as=reported)


def _ready_dtype(call: Call, product: str, device: torch.device) -> torch.dtype | None:
    """The dtype a product's operands are needed in: quantisers make them on the way. `None`: packed."""
    if call.recipe.gemm != "bf16":
        return None
    exact = [exact_dtype(name) for name in operand_quantizers(call.recipe, product)]
    return gemm_dtype(exact, call.compute_dtype, device)


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
        result = gemm(left, right, out_dtype=out_dtype, bias=bias)
    else:
        left, right = _decoded(call, left, right)
        is_transformed = product == "grad_weight" and call.recipe.hadamard
        result = multiply_split(
            lambda wide_dtype, bias: gemm(left, right, out_dtype=wide_dtype, bias=bias),
            Side(left, transpose_left),
            Side(right, transpose_right),
            compute_dtype=call.compute_dtype,
            out_dtype=out_dtype,
            bias=bias,
            signs=call.hadamard_signs if is_transformed else None,
        )
    call.show(product, left, right, result, bias)
    return result


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
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *factors: Tensor
    ) -> Tensor:
        """See `lowbit_linear`."""
        needs_input, *needs_parts = ctx.needs_input_grad
        del needs_parts[1:3]  # of bias and call
        result = forward_products(
            call,
            input,
            weight,
            bias,
            WeightFactors(*factors) if factors else None,
            keeps_input=call.needs_grad and any(needs_parts),
            keeps_weight=call.needs_grad and needs_input,
        )
        if call.needs_grad:
            save_factors(ctx, result.input, result.weight, others=factors)
            ctx.call, ctx.in_features = call, weight.shape[1]
            ctx.dtypes = Dtypes(input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return result.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias and factors, from grad_output (…, out_features)."""
        (saved_input, saved_weight), factors = restore_factors(ctx)
        gradients = backward_products(
            ctx.call,
            grad_output,
            saved_input,
            saved_weight,
            WeightFactors(*factors) if factors else None,
            in_features=ctx.in_features,
            dtypes=ctx.dtypes,
            needs_bias=ctx.needs_input_grad[2],
        )
        return *gradients[:3], None, *gradients[3:]


def lowbit_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, factors: WeightFactors | None = None
) -> Tensor:
    """Compute input · weightᵀ + bias with the quantised operands of `call`, differentiable once.

    Args:
        input: (…, in_features), any rank from 1 on, any strides, may be empty.
        weight: (out_features, in_features).
        bias: (out_features,) or `None`.
        call: quantisers, dtypes and slots.
        factors: U, S and V where the weight is W_R + U·diag(S)·V and `weight` is W_R.

    Returns:
        (…, out_features) in `call.compute_dtype`.
    """
    return LowbitLinear.apply(input, weight, bias, call, *(factors or ()))
