"""The autograd function of a low-bit linear layer: quantise operands, compute products and gradients.

    forward      output      = Q(input) (M, K) · Q(weight)ᵀ (K, N) + bias (N,)      → (M, N)
    backward     grad_input  = Q(grad_output) (M, N) · Q(weight) (N, K)             → (M, K)
                 grad_weight = Q(grad_output)ᵀ (N, M) · Q(input) (M, K)             → (N, K)
                 grad_bias   = column sums of grad_output, not quantised            → (N,)

M counts tokens: all leading axes of the input, flattened. K is in_features and N out_features. The package's
docstring lists how each operand is stored.

Forward keeps packed operands for backward (4.5 bits an element for NVFP4), not the tensors they were made
from. Backward decodes them again. Only requested gradients are computed, and only what they need is saved.

The gradient is the straight-through estimator: rounding and clipping count as the identity, but for `quest`.

With `quest`, elements that it saturated get no gradient: the mask of an operand of `output` is kept beside
the other one, with which the gradient is computed.

If the weight's gradients are summed in fp32 (`slots.GradientSums`), the GEMM adds grad_weight to that sum in
fp32, and autograd gets no gradient of the weight. Products on FP8 and FP4 tensor cores cannot add, a weight
split into parameters needs the gradient for its factors, and a mask changes the product: in these cases
autograd gets it. A probe must not change the sum, so the product that it inspects is computed once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit import cuda_graphs
from megalowbit.derivative_checks import check_backward
from megalowbit.layers.layer_recipe import operand_quantizers
from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.matmul.context import MatmulContext, SplitOperand, once
from megalowbit.layers.matmul.gemms import add_product, can_start_from, column_sums, gemm_dtype, multiply
from megalowbit.layers.matmul.operand import MatmulOperand, exact_dtype, restore_operands, save_operands
from megalowbit.layers.matmul.quantizations import Quantization, scale_format
from megalowbit.layers.matmul.slots import GradientSums
from megalowbit.layers.matmul.split import Side, add_split_product, multiply_split
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.quantized_tensor import matrix_shape

# For each product: whether its left and its right operand are transposed. Operands are stored in the order of
# their tensors: input (M, K), weight (N, K), grad_output (M, N).
TRANSPOSES = MappingProxyType(
    {"output": (False, True), "grad_input": (False, False), "grad_weight": (True, False)}
)
PLAIN_LAYER = "use mlb.restore on the model, or name the layer in the recipe's `keep`"


class Forward(NamedTuple):
    """The output and what is kept for backward.

    Attributes:
        output: (…, out_features).
        input: the operand of grad_weight; `None` if that gradient is not needed. To be kept as `to_parts`,
            without what only the output needed.
        weight: the operand of grad_input, likewise.
    """

    output: Tensor
    input: MatmulOperand | None
    weight: MatmulOperand | None


def forward_products(
    context: MatmulContext,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: WeightFactors | None = None,
    *,
    keeps_input: bool,
    keeps_weight: bool,
) -> Forward:
    """Quantise the operands, compute the output, and prepare the operands of backward.

    Arguments are those of `lowbit_linear`. `factors` are not kept here. Set `keeps_input` if the gradient of
    the weight or of a factor is needed, and `keeps_weight` if that of the input is needed.
    """
    plan = context.quantizations
    context.record_input(input)
    # Evaluated once, and only if no sibling or no cache has the quantised forms.
    split_input = once(lambda: context.split(input, "input"))
    split_weight = once(lambda: context.split(weight, "weight", factors))
    wanted = [plan.input, plan.backward_input] if keeps_input else [plan.input]
    wanted += [plan.weight, plan.backward_weight] if keeps_weight else [plan.weight]
    context.exchange_maxima(wanted, {"input": input, "weight": weight})
    context.probe_operands(input=input, weight=weight)

    sizes = (*matrix_shape(input.shape), weight.shape[0])
    ready = _ready_dtype(context, "output", input.device, sizes)
    x = context.input(input, plan.input, split_input, operand_dtype=ready.left)
    w = context.weight(
        weight, plan.weight, lambda: context.quantize(split_weight(), plan.weight, operand_dtype=ready.right)
    )
    whole, dtype = w if factors is None else factors.attach_to(w), context.compute_dtype
    sums_output = context.shards is not None and context.shards.is_row
    own_bias = None if sums_output else bias
    output = _product(context, "output", x, whole, out_dtype=dtype, bias=own_bias)
    if context.shards is not None and sums_output:
        output = context.shards.sum_output(output, bias)
    kept_input = kept_weight = None
    if keeps_input:  # for the weight's gradient
        kept_input = _input_for_backward(context, input, split_input, x)
        kept_input = context.with_mask(kept_input, weight, plan.weight, w)
    if keeps_weight:  # for the input's gradient
        kept_weight = _weight_for_backward(context, weight, split_weight, w)
        kept_weight = context.with_mask(kept_weight, input, plan.input, x)
    return Forward(_unflattened(output, input.shape), kept_input, kept_weight)  # (M, N) → (…, out_features)


def _unflattened(matrix: Tensor, shape: torch.Size) -> Tensor:
    """The matrix with the leading axes of a shape; no view for autograd, so users may change it in place."""
    if len(shape) == 2:
        return matrix
    whole: Tensor = torch.ops.aten._unsafe_view.default(matrix, [*shape[:-1], matrix.shape[1]])
    return whole


def _input_for_backward(
    context: MatmulContext, input: Tensor, split: Callable[[], SplitOperand], forward: MatmulOperand
) -> MatmulOperand:
    wanted = context.quantizations.backward_input
    if wanted is context.quantizations.input:  # the same codes
        return forward
    return context.input(input, wanted, split)


def _weight_for_backward(
    context: MatmulContext, weight: Tensor, split: Callable[[], SplitOperand], forward: MatmulOperand
) -> MatmulOperand:
    wanted = context.quantizations.backward_weight
    if wanted is context.quantizations.weight:
        return forward
    return context.weight(weight, wanted, lambda: context.quantize(split(), wanted))


# Calls its argument with an fp32 sum and a factor, if the gradient may be added there; see `GradientSums`.
AddToSum = Callable[[Callable[[Tensor, float], bool]], bool]


class Dtypes(NamedTuple):
    """Dtypes of the tensors that get a gradient; each gradient has its tensor's dtype."""

    input: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None


def backward_products(
    context: MatmulContext,
    grad_output: Tensor,
    input: MatmulOperand | None,
    weight: MatmulOperand | None,
    factors: WeightFactors | None = None,
    *,
    in_features: int,
    dtypes: Dtypes,
    needs_bias: bool,
    add_to_sum: AddToSum | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias; if the weight is split into parameters, also those of U, S and V.

    `input` and `weight` are what `Forward` kept, `grad_output` is (…, out_features), and `dtypes` are those
    of the gradients. The weight's gradient is `None` if `add_to_sum` has added it. The other arguments are
    those of `forward_products`.
    """
    if context.finish is not None:
        context.finish()
    grad_input = grad_weight = grad_bias = None
    grad, grad_t = _quantize_gradient(
        context, grad_output, in_features, for_input=weight is not None, for_weight=input is not None
    )
    if weight is not None:
        assert grad is not None  # made above
        whole = weight if factors is None else factors.attach_to(weight)
        grad_input = _gradient(context, "grad_input", grad, whole, out_dtype=dtypes.input)
        grad_input = _unflattened(grad_input, grad_output.shape)
    grad = None  # with separate copies, this one is not needed any more
    if grad_t is not None and context.recipe.gemm == "fp8":
        grad_t = grad_t.packed()  # without FP8 numbers, because the next product reads their transpose
    summing = None if context.shards is None else context.shards.start_sum_grad_input(grad_input)
    if input is not None:
        assert grad_t is not None  # made above
        add = add_to_sum if input.gradient_mask is None else None  # a mask changes the product
        is_added = add is not None and add(functools.partial(_add_grad_weight, context, grad_t, input))
        if not is_added or context.probe is not None:  # a probe gets the product itself, added or not
            product = _gradient(context, "grad_weight", grad_t, input, out_dtype=dtypes.weight)
            grad_weight = None if is_added else product
    if needs_bias and dtypes.bias is not None:
        grad_bias = column_sums(grad_output.reshape(matrix_shape(grad_output.shape)), dtypes.bias)
    grad_t = None
    if summing is not None:  # the all-reduce ran while the other gradients were computed
        summing.wait()
    if factors is None:
        return grad_input, grad_weight, grad_bias
    of_factors = (None,) * 3 if grad_weight is None else factors.gradients(grad_weight, context.compute_dtype)
    return grad_input, grad_weight, grad_bias, *of_factors


def _gradient(
    context: MatmulContext, product: str, grad: MatmulOperand, kept: MatmulOperand, *, out_dtype: torch.dtype
) -> Tensor:
    """A gradient's product with a kept operand, and its mask, which is applied in fp32 or fp64."""
    if kept.gradient_mask is None:
        return _product(context, product, grad, kept, out_dtype=out_dtype)
    plan, wide = context.quantizations, torch.promote_types(out_dtype, torch.float32)
    whole = _product(context, product, grad, kept, out_dtype=wide)
    return context.masked(whole, kept, plan.input if product == "grad_input" else plan.weight).to(out_dtype)


def _quantize_gradient(
    context: MatmulContext, grad_output: Tensor, in_features: int, *, for_input: bool, for_weight: bool
) -> tuple[MatmulOperand | None, MatmulOperand | None]:
    """The output gradient for grad_input and for grad_weight; `None` if the product is not needed."""
    plan = context.quantizations
    wanted: dict[Quantization, str] = {}  # quantisation → the first product that reads it
    if for_input:
        wanted[plan.grad_output] = "grad_input"
    if for_weight:
        wanted.setdefault(plan.grad_output_for_weight, "grad_weight")
    if not wanted:
        return None, None
    operand = context.split(grad_output, "grad_output")
    context.exchange_maxima(wanted, {"grad_output": grad_output})
    context.probe_operands(grad_output=grad_output)
    made: dict[Quantization, MatmulOperand] = {}
    for each, product in wanted.items():
        # Report the first quantised copy only; a copy that is not quantised has no counts.
        is_first = all(other.quantizer.is_identity for other in made)
        sizes = (*matrix_shape(grad_output.shape), in_features)
        ready = _ready_dtype(context, product, grad_output.device, sizes).left
        if product == "grad_weight" and context.recipe.gemm == "fp8":
            ready = None  # it reads the transpose
        made[each] = context.quantize(operand, each, operand_dtype=ready, is_reported=is_first)
    return made.get(plan.grad_output), made.get(plan.grad_output_for_weight)


class ReadyDtypes(NamedTuple):
    """Dtypes in which a product reads its operands, made while quantising; `None`: it reads codes."""

    left: torch.dtype | None
    right: torch.dtype | None


def _ready_dtype(
    context: MatmulContext, product: str, device: torch.device, sizes: tuple[int, ...]
) -> ReadyDtypes:
    """What a product of these sizes reads; `sizes` are tokens, in_features and out_features in any order."""
    gemm = context.recipe.gemm
    if gemm == "bf16":
        dtype = gemm_dtype(_exact_dtypes(context.recipe, product), context.compute_dtype, device)
        return ReadyDtypes(dtype, dtype)
    formats = [scale_format(name) for name in operand_quantizers(context.recipe, product)]
    may_fit = fp8_product.may_fit(formats, sizes)
    if gemm == "fp8" and context.compute_dtype != torch.float64 and may_fit:
        return ReadyDtypes(*fp8_product.DTYPES[product])
    return ReadyDtypes(None, None)


@functools.lru_cache(maxsize=1024)
def _exact_dtypes(recipe: Recipe, product: str) -> tuple[torch.dtype | None, ...]:
    return tuple(map(exact_dtype, operand_quantizers(recipe, product)))


def _product(
    context: MatmulContext,
    product: str,
    left: MatmulOperand,
    right: MatmulOperand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute one product, also of split operands."""
    if left.low_rank is None and right.low_rank is None:
        result = _gemm(context, product, left, right, out_dtype=out_dtype, bias=bias)
    else:
        gemm = functools.partial(_gemm, context, product)
        if context.recipe.gemm == "bf16":
            left, right = _decoded(context, left, right)
        result = multiply_split(
            lambda wide_dtype, bias, total=None: gemm(
                left, right, out_dtype=wide_dtype, bias=bias, total=total
            ),
            *_sides(product, left, right),
            compute_dtype=context.compute_dtype,
            out_dtype=out_dtype,
            bias=bias,
            signs=_signs(context, product),
            may_start=context.recipe.gemm == "bf16"
            and can_start_from(left.tensor, right.tensor, context.compute_dtype, out_dtype),
        )
    if context.probe is not None:
        context.probe_product(product, left, right, result, bias)
    return result


def _add_grad_weight(
    context: MatmulContext, left: MatmulOperand, right: MatmulOperand, total: Tensor, factor: float
) -> bool:
    """Add factor · grad_weight to `total`, if the GEMM can add."""
    product = "grad_weight"
    if context.recipe.gemm != "bf16":
        return False
    is_split = left.low_rank is not None or right.low_rank is not None
    if is_split:
        left, right = _decoded(context, left, right)
    transpose_left, transpose_right = _transposes(product, left, right)
    settings: dict[str, Any] = {"compute_dtype": context.compute_dtype, "factor": factor}
    add = functools.partial(
        add_product,
        total,
        left.tensor,
        right.tensor,
        transpose_left=transpose_left,
        transpose_right=transpose_right,
        **settings,
    )
    if is_split:
        sides = _sides(product, left, right)
        is_added = add_split_product(total, add, *sides, signs=_signs(context, product), **settings)
    else:
        is_added = add()
    if is_added and context.probe is None:  # for a probe it runs once more
        _count(context, product, "bf16", total.device)
    return is_added


def _count(context: MatmulContext, product: str, path: str, device: torch.device) -> None:
    """Count a product; one that is captured does not run now, and its replays are not seen."""
    if context.count is not None and not cuda_graphs.is_capturing(device):
        context.count(product, path)


def _decoded(
    context: MatmulContext, left: MatmulOperand, right: MatmulOperand
) -> tuple[MatmulOperand, MatmulOperand]:
    """Split operands with their residuals decoded, because the thin products read these as well."""
    exact = left.tensor.exact_dtype, right.tensor.exact_dtype
    dtype = gemm_dtype(exact, context.compute_dtype, left.device)
    return left.decoded(dtype), right.decoded(dtype)


def _sides(product: str, left: MatmulOperand, right: MatmulOperand) -> tuple[Side, Side]:
    transpose_left, transpose_right = TRANSPOSES[product]
    return Side(left, transpose_left), Side(right, transpose_right)


def _signs(context: MatmulContext, product: str) -> int | None:
    """Signs of the Hadamard transform along the axis that a product sums over, or `None`."""
    return context.hadamard_signs if product in context.recipe.transformed_products else None


def _transposes(product: str, left: MatmulOperand, right: MatmulOperand) -> tuple[bool, bool]:
    """Whether a product takes the transposes of the stored matrices.

    TRANSPOSES refers to the original tensors. With the layout `per_gemm`, grad_weight reads grad_outputᵀ as
    stored, (N, M), but inputᵀ (K, M) as (M, K).
    """
    transpose_left, transpose_right = TRANSPOSES[product]
    return transpose_left != left.is_transposed, transpose_right != right.is_transposed


def _gemm(
    context: MatmulContext,
    product: str,
    left: MatmulOperand,
    right: MatmulOperand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    total: Tensor | None = None,
) -> Tensor:
    """Run one GEMM of two stored operands in the recipe's precision, or in bf16 if that is not possible.

    `total` is that of `gemms.multiply`, for recipes whose GEMMs are bf16.
    """
    transpose_left, transpose_right = _transposes(product, left, right)
    arguments: dict[str, Any] = {
        "transpose_left": transpose_left,
        "transpose_right": transpose_right,
        "out_dtype": out_dtype,
        "bias": bias,
    }
    result, path, is_counted_there = None, context.recipe.gemm, False
    fp8_counts = context.fp8_counts

    def counts_there(device: torch.device) -> Tensor:
        nonlocal is_counted_there
        assert fp8_counts is not None  # passed on only then
        is_counted_there = True
        return fp8_counts(product, device)

    if path == "fp8" and context.compute_dtype != torch.float64:
        counts = None if fp8_counts is None else counts_there
        dtypes = fp8_product.DTYPES[product]
        result = fp8_product.multiply(left, right, **arguments, dtypes=dtypes, counts=counts)
    elif path == "fp4":
        result = native_fp4.multiply(left, right, out_dtype=out_dtype, bias=bias)
    if result is None:
        path = "bf16"
        arguments |= {"compute_dtype": context.compute_dtype, "total": total}
        result = multiply(left.tensor, right.tensor, **arguments)
    if not is_counted_there:
        _count(context, product, path, result.device)
    return result


def _weight_sum(ctx: Any) -> AddToSum | None:
    """Adds to the sum of the weight's gradients, if the weight is a parameter that has one."""
    accumulator = ctx.next_functions[1][0]  # of forward's second argument
    weight: Tensor | None = getattr(accumulator, "variable", None)  # `None`: computed or frozen
    sums: GradientSums | None = getattr(weight, "grad_buffer", None)
    if weight is None or sums is None:
        return None
    return functools.partial(sums.add_gradient, weight, accumulator)


class LowbitLinear(torch.autograd.Function):
    """output = Q(input) · Q(weight)ᵀ + bias with gradients from low-bit products; call `lowbit_linear`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, context: MatmulContext, *factors: Tensor
    ) -> Tensor:
        """See `lowbit_linear`."""
        needs_input, *needs_parts = ctx.needs_input_grad
        del needs_parts[1:3]  # bias and context
        result = forward_products(
            context,
            input,
            weight,
            bias,
            WeightFactors(*factors) if factors else None,
            keeps_input=context.needs_grad and any(needs_parts),
            keeps_weight=context.needs_grad and needs_input,
        )
        if context.needs_grad:
            save_operands(ctx, result.input, result.weight, others=factors)
            ctx.context, ctx.in_features = context, weight.shape[1]
            ctx.dtypes = Dtypes(input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return result.output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias and factors, from grad_output (…, out_features)."""
        check_backward(grad_output, ctx.context.title, PLAIN_LAYER)
        (saved_input, saved_weight), factors = restore_operands(ctx)
        gradients = backward_products(
            ctx.context,
            grad_output,
            saved_input,
            saved_weight,
            WeightFactors(*factors) if factors else None,
            in_features=ctx.in_features,
            dtypes=ctx.dtypes,
            needs_bias=ctx.needs_input_grad[2],
            add_to_sum=None if factors else _weight_sum(ctx),
        )
        return *gradients[:3], None, *gradients[3:]


def lowbit_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: MatmulContext,
    factors: WeightFactors | None = None,
) -> Tensor:
    """Compute input · weightᵀ + bias with quantised operands; differentiable once.

    Args:
        input: (…, in_features), at least one axis, any strides; may be empty.
        weight: (out_features, in_features).
        bias: (out_features,) or `None`.
        context: quantizers, dtypes and slots.
        factors: U, S and V if the weight is W_R + U·diag(S)·V; then `weight` is W_R.

    Returns:
        (…, out_features) in `context.compute_dtype`.
    """
    return LowbitLinear.apply(input, weight, bias, context, *(factors or ()))
