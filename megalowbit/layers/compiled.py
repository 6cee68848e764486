"""BitLinear inside a compiled model: two opaque operators that run exactly the eager code.

Traced into, a layer would leave its random key, its use counter and its observer in the graph as constants
of the first step, and its quantiser as hundreds of operations that a compiler may reorder, contract and so
round differently. As an operator for forward and one for backward it stays one node: no graph break, no
recompilation from step to step, the same bits as without `torch.compile`. See docs/decisions/0004.

An operator takes tensors and plain values only, so a layer is named by an integer, looked up at run time in
a registry that does not keep layers alive. The micro-batch comes in as a tensor, which `advance` counts up
within the graph; what backward must know of its forward (step, use, exponent ranges) travels in a small CPU
tensor, the ticket, whose memory also keeps the layer alive until then. Quantised weights out of a cache are
copied, since a compiler may reuse the memory of what an operator returns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.layers.matmul.function import Dtypes, backward_products, forward_products
from megalowbit.layers.matmul.operand import Factor
from megalowbit.layers.matmul.saved import empty_parts, factor_from, input_layout, parts_of, weight_layout
from megalowbit.layers.matmul.use_counter import Use, is_recomputing
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.quantize.random_stream import check_advance

if TYPE_CHECKING:
    from megalowbit.layers.bitlinear import BitLinear

TICKET_LENGTH = 8
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)  # neither merged nor replayed


@functools.lru_cache(maxsize=1)
def _layers() -> tuple[WeakValueDictionary[int, BitLinear], Iterator[int]]:
    """The registry and the handles to come: state of the process, on purpose.

    An operator is a function of the process and takes no objects, so whatever leads from its plain arguments
    to a layer has to be found from here. See docs/decisions/0004.
    """
    return WeakValueDictionary(), itertools.count(1)


def register(layer: BitLinear) -> int:
    """A handle by which the operators find a layer; it never names another one."""
    layers, handles = _layers()
    handle = next(handles)
    layers[handle] = layer
    return handle


def _layer(handle: int) -> BitLinear:
    layer = _layers()[0].get(handle)
    if layer is None:
        raise UserError(
            f"a compiled graph runs BitLinear number {handle}, which has been freed: "
            "keep the model as long as what was compiled from it"
        )
    return layer


class _Ticket(np.ndarray):
    """Memory of a ticket. A tensor's storage holds on to its array, and the array to the layer."""

    layer: BitLinear

    @staticmethod
    def tensor(values: Sequence[int], layer: BitLinear) -> Tensor:
        """A ticket (int64, on the CPU) whose saved copies keep the layer alive.

        A graph has no context at run time that could hold an object: only saved tensors last till backward.
        """
        array = np.array(values, dtype=np.int64).view(_Ticket)
        array.layer = layer
        return torch.from_numpy(array)


def opaque_linear(
    layer: BitLinear,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: WeightFactors | None,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The layer's forward, as one node of a traced graph."""
    has_graph = torch.is_grad_enabled()
    stream = layer.random_stream
    needs_weight = any(part.requires_grad for part in (weight, *(factors or ())))
    outputs = _forward(
        input,
        weight,
        bias,
        *(factors or (None, None, None)),
        None if stream is None else stream.step_tensor,
        layer._handle,
        compute_dtype,
        has_graph and needs_weight,
        has_graph and input.requires_grad,
        has_graph,
    )
    return outputs[0]


@torch.library.custom_op("megalowbit::advance", mutates_args=("step",))
def advance(step: Tensor) -> None:
    """Count up the micro-batch (0-dim int64 on the CPU), except where checkpointing repeats a forward."""
    # The tensor is the argument, not the stream: so the compiler sees that layers read what is written here.
    if not is_recomputing():
        check_advance(int(step))
        step += 1


@advance.register_fake
def _(step: Tensor) -> None:
    del step


@torch.library.custom_op("megalowbit::linear", mutates_args=(), tags=_TAGS)
def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    u: Tensor | None,
    s: Tensor | None,
    v: Tensor | None,
    step: Tensor | None,
    handle: int,
    compute_dtype: torch.dtype,
    keeps_input: bool,
    keeps_weight: bool,
    needs_grad: bool,
) -> list[Tensor]:
    layer = _layer(handle)
    use = layer.begin_use(None if step is None else int(step))
    call = layer.call(use, compute_dtype=compute_dtype, needs_grad=needs_grad)
    factors = _factors(u, s, v)
    result = forward_products(
        call, input, weight, bias, factors, keeps_input=keeps_input, keeps_weight=keeps_weight
    )
    if not needs_grad:
        return [result.output]
    ticket = _Ticket.tensor([*use, *_exponents(result.input), *_exponents(result.weight)], layer)
    parts = parts_of(result.input, is_shared=False)
    parts += parts_of(result.weight, is_shared=call.weights is not None)
    return [result.output, ticket, *parts]


def _factors(*parts: Tensor | None) -> WeightFactors | None:
    u, s, v = parts
    return None if u is None or s is None or v is None else WeightFactors(u, s, v)


def _exponents(factor: Factor | None) -> tuple[int, int]:
    if factor is None or factor.exponents is None:
        return -1, -1
    return factor.exponents.lowest, factor.exponents.highest


@_forward.register_fake
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    u: Tensor | None,
    s: Tensor | None,
    v: Tensor | None,
    step: Tensor | None,
    handle: int,
    compute_dtype: torch.dtype,
    keeps_input: bool,
    keeps_weight: bool,
    needs_grad: bool,
) -> list[Tensor]:
    del bias, u, s, v, step
    layer = _layer(handle)
    outputs = [input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=compute_dtype)]
    if needs_grad:
        outputs.append(torch.empty(TICKET_LENGTH, dtype=torch.int64, device="cpu"))
    if keeps_input:
        outputs += empty_parts(input_layout(layer.recipe, layer.sizes, input.shape), input)
    if keeps_weight:
        outputs += empty_parts(weight_layout(layer.recipe, layer.sizes, weight.shape), weight)
    return outputs


@torch.library.custom_op("megalowbit::linear_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grad_output: Tensor,
    saved: list[Tensor],
    factors: list[Tensor],
    handle: int,
    compute_dtype: torch.dtype,
    input_shape: list[int],
    weight_shape: list[int],
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs_weight: bool,
    needs_input: bool,
) -> list[Tensor]:
    layer = _layer(handle)
    if handle != layer._handle:
        raise UserError(
            f"the recipe of {layer._title()} was changed between a compiled forward and its backward: "
            "change it after backward"
        )
    ticket, *parts = saved
    step, number, is_replay, is_training, *exponents = ticket.tolist()
    call = layer.call(
        Use(step, number, bool(is_replay), bool(is_training)), compute_dtype=compute_dtype, needs_grad=True
    )
    input_factor = weight_factor = None
    if needs_weight:
        layout = input_layout(layer.recipe, layer.sizes, input_shape)
        input_factor, parts = factor_from(layout, input_dtype, parts, (exponents[0], exponents[1]))
    if needs_input:
        layout = weight_layout(layer.recipe, layer.sizes, weight_shape)
        weight_factor, _ = factor_from(layout, weight_dtype, parts, (exponents[2], exponents[3]))
    gradients = backward_products(
        call,
        grad_output,
        input_factor,
        weight_factor,
        WeightFactors(*factors) if factors else None,
        in_features=weight_shape[1],
        dtypes=Dtypes(input_dtype, weight_dtype, bias_dtype),
        needs_bias=bias_dtype is not None,
    )
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(
    grad_output: Tensor,
    saved: list[Tensor],
    factors: list[Tensor],
    handle: int,
    compute_dtype: torch.dtype,
    input_shape: list[int],
    weight_shape: list[int],
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs_weight: bool,
    needs_input: bool,
) -> list[Tensor]:
    del saved, compute_dtype, handle
    gradients = []
    if needs_input:
        gradients.append(grad_output.new_empty(input_shape, dtype=input_dtype))
    if needs_weight:
        gradients.append(grad_output.new_empty(weight_shape, dtype=weight_dtype))
    if bias_dtype is not None:
        gradients.append(grad_output.new_empty((weight_shape[0],), dtype=bias_dtype))
    if needs_weight:
        gradients += [torch.empty_like(part, memory_format=torch.contiguous_format) for part in factors]
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    input, weight, bias, u, s, v, _, handle, compute_dtype, keeps_input, keeps_weight, needs_grad = inputs
    factors = () if u is None else (u, s, v)
    ctx.has_factors = bool(factors)
    ctx.handle, ctx.compute_dtype, ctx.needs = handle, compute_dtype, (keeps_input, keeps_weight)
    ctx.input_shape, ctx.weight_shape = input.shape, weight.shape
    ctx.dtypes = input.dtype, weight.dtype, bias.dtype if bias is not None and bias.requires_grad else None
    if needs_grad:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*factors, *output[1:])


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of `_forward`'s arguments."""
    grad_output, (keeps_input, keeps_weight) = grads[0], ctx.needs
    num_factors = 3 if ctx.has_factors else 0
    wanted = [keeps_weight, keeps_input, ctx.dtypes[2] is not None]
    wanted += [ctx.has_factors and keeps_input] * 3
    found: list[Tensor | None] = [None] * len(wanted)
    if grad_output is not None and any(wanted):
        gradients = iter(
            _backward(
                grad_output,
                list(ctx.saved_tensors[num_factors:]),
                list(ctx.saved_tensors[:num_factors]),
                ctx.handle,
                ctx.compute_dtype,
                list(ctx.input_shape),
                list(ctx.weight_shape),
                *ctx.dtypes,
                keeps_input,
                keeps_weight,
            )
        )
        found = [next(gradients) if is_wanted else None for is_wanted in wanted]
    return (*found, None, None, None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)
