"""BitLinear in a compiled model: two opaque operators that run the eager code.

Selective activation checkpointing uses them too, because it needs operations that repeat exactly.

If torch traced into a layer, its random key, use counter and observer would become constants of the first
step, and its quantizer would become hundreds of operations that a compiler may reorder, contract and so round
differently. With one operator for forward and one for backward, the layer is one node of the graph: no graph
break, no recompilation from step to step, and the same bits as without `torch.compile`. See
docs/decisions/0004.

An operator takes tensors and plain values only. Therefore

- an integer handle identifies the layer. It is looked up at run time in a registry with weak references.
- the micro-batch is passed as a tensor, which `advance` increments within the graph.
- backward gets step and use of its forward in a small CPU tensor, the saved handle, whose
  memory also keeps the layer alive until then.

Cached quantised weights are copied, because a compiler may reuse the memory of an operator's results.

These operators must not be captured in a CUDA graph: a replay would neither count the use nor read the
micro-batch. Where all else of a layer is on the GPU (`may_be_captured`), its operators are `captured_linear`
and `captured_linear_backward`, which do neither. `draw_keys` runs on the host at each step. It counts the
use, and writes micro-batch and keys to the device, as one tensor that the two operators read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.library import CustomOpDef

from megalowbit.derivative_checks import check_backward
from megalowbit.errors import UserError
from megalowbit.layers.layer_recipe import SPLIT_FIELDS
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.matmul.function import PLAIN_LAYER, Dtypes, backward_products, forward_products
from megalowbit.layers.matmul.quantizations import quantizations_of
from megalowbit.layers.matmul.saved import parts_of, template
from megalowbit.layers.matmul.use_counter import Use, is_recomputing
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.backends import KERNEL_DTYPES, has_random_kernel
from megalowbit.quantize.philox import RandomKey, StoredKey, signed
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.quantize.random_stream import RandomStream, check_advance

SAVED_LENGTH = 4  # entries of a saved handle: a `Use`
ON_HOST = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)  # do not merge, do not replay
ON_DEVICE = (torch.Tag.nondeterministic_seeded,)


class CompiledLayer(Protocol):
    """The interface of a layer that the operators use; `BitLinear` implements it."""

    handle: int
    random_stream: RandomStream | None

    @property
    def recipe(self) -> Recipe:
        """The quantizers."""

    @property
    def sizes(self) -> tuple[int, int]:
        """in_features and out_features."""

    @property
    def changes_no_host_state(self) -> bool:
        """Whether a use of the layer changes nothing on the host but its number of uses."""

    @property
    def title(self) -> str:
        """The layer's name in messages."""

    def begin_use(self, step: int | None = None) -> Use:
        """Count a use of the layer."""

    def context(self, use: Use, *, compute_dtype: torch.dtype, needs_grad: bool) -> MatmulContext:
        """The context of one use of the layer."""

    def random_key(self, use: Use, role: str, device: torch.device) -> RandomKey:
        """The key of an operand's random numbers in one use."""


@functools.lru_cache(maxsize=1)
def _layers() -> tuple[WeakValueDictionary[int, CompiledLayer], Iterator[int]]:
    """The registry and the next handles: deliberately state of the process.

    An operator belongs to the process and takes no objects, so it must find a layer from its plain arguments
    here. See docs/decisions/0004.
    """
    return WeakValueDictionary(), itertools.count(1)


def register(layer: CompiledLayer) -> int:
    """A handle by which the operators find the layer; it is never reused for another one."""
    layers, handles = _layers()
    handle = next(handles)
    layers[handle] = layer
    return handle


def _layer(handle: int) -> CompiledLayer:
    layer = _layers()[0].get(handle)
    if layer is None:
        raise UserError(
            f"a compiled graph runs BitLinear number {handle}, which has been freed: "
            "keep the model alive as long as its compiled form"
        )
    return layer


class _SavedHandle(np.ndarray):
    """Memory of a saved handle: a tensor's storage references this array, and the array the layer."""

    layer: CompiledLayer

    @staticmethod
    def tensor(values: Sequence[int], layer: CompiledLayer) -> Tensor:
        """A saved handle (int64, on the CPU) that keeps the layer alive.

        At run time a graph has no context that could hold an object; only saved tensors last until backward.
        """
        array = np.array(values, dtype=np.int64).view(_SavedHandle)
        array.layer = layer
        return torch.from_numpy(array)


def compiled_linear(
    layer: CompiledLayer,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: WeightFactors | None,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The layer's forward as one node of a traced graph."""
    has_graph = torch.is_grad_enabled()
    stream = layer.random_stream
    needs_weight = any(part.requires_grad for part in (weight, *(factors or ())))
    forward, step = _forward, None if stream is None else stream.step_tensor
    is_shared = torch.compiler.is_compiling() and step is not None
    if is_shared and layer.changes_no_host_state and may_be_captured(layer.handle, input.device, input.dtype):
        forward, step = _captured_forward, draw_keys(step, layer.handle, input.device)
    outputs = forward(
        input,
        weight,
        bias,
        *(factors or (None, None, None)),
        step,
        layer.handle,
        compute_dtype,
        has_graph and needs_weight,
        has_graph and input.requires_grad,
        has_graph,
    )
    return outputs[0]


@torch.library.custom_op("megalowbit::advance", mutates_args=("step",))
def advance(step: Tensor) -> None:
    """Increment the micro-batch (0-dim int64 on the CPU), unless checkpointing repeats a forward."""
    # The argument is the tensor, not the stream, so the compiler sees that layers read what is written here.
    if not is_recomputing():
        check_advance(int(step))
        step += 1


@advance.register_fake
def _(step: Tensor) -> None:
    del step


def may_be_captured(handle: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a layer may run in a CUDA graph, as far as its recipe and the input decide.

    Random numbers must come from kernels that read their key in memory. Splits and random transforms draw on
    the host. Products on FP8 tensor cores are counted there, and some of them are subtracted on the device.
    """
    recipe = _layer(handle).recipe
    has_splits = any(getattr(recipe, field) is not None for field in SPLIT_FIELDS)
    if has_splits or recipe.redraws_signs or recipe.gemm == "fp8":
        return False
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return False
    drawn = [each.quantizer for each in quantizations_of(recipe) if each.quantizer.is_stochastic]
    return all(
        isinstance(each, BlockQuantizer) and has_random_kernel(each.encoding, device) for each in drawn
    )


# Same as `torch.compiler.assume_constant_result`; that call imports the compiler, which takes 2 s.
vars(may_be_captured)["_dynamo_marked_constant"] = True


def _drawn_roles(recipe: Recipe) -> list[str]:
    """The roles whose keys `draw_keys` writes, in order."""
    return list(dict.fromkeys(each.role for each in quantizations_of(recipe) if each.quantizer.is_stochastic))


@torch.library.custom_op("megalowbit::draw_keys", mutates_args=(), tags=ON_HOST)
def draw_keys(step: Tensor, handle: int, device: torch.device) -> Tensor:
    """Count a use of a layer, and write the keys of its random numbers to the device.

    Returns:
        int64 (roles, 2): in each row the micro-batch and a key, a `StoredKey`.
    """
    layer = _layer(handle)
    use = layer.begin_use(int(step))
    keys = [layer.random_key(use, role, device).key for role in _drawn_roles(layer.recipe)]
    rows = [(signed(use.step), signed(key)) for key in keys]
    is_pinned = device.type == "cuda"  # otherwise each layer would wait for the GPU here
    on_host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=is_pinned).view(-1, 2)
    return on_host.to(device, copy=True, non_blocking=is_pinned)


@draw_keys.register_fake
def _(step: Tensor, handle: int, device: torch.device) -> Tensor:
    del step
    return torch.empty((len(_drawn_roles(_layer(handle).recipe)), 2), dtype=torch.int64, device=device)


def _captured_context(
    layer: CompiledLayer, keys: Tensor, compute_dtype: torch.dtype, *, needs_grad: bool
) -> MatmulContext:
    """The context of a use that `draw_keys` has counted; nothing in it depends on the step or is counted."""
    context = layer.context(Use(0, 0, False, False), compute_dtype=compute_dtype, needs_grad=needs_grad)
    roles = _drawn_roles(layer.recipe)
    return replace(context, random_key=lambda role, _device: StoredKey(keys.select(0, roles.index(role))))


class _ForwardArguments(NamedTuple):
    """Arguments of the forward operators.

    `step` is the micro-batch if the layer shares a stream; for `captured_linear`, what `draw_keys` returns.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    u: Tensor | None
    s: Tensor | None
    v: Tensor | None
    step: Tensor | None
    handle: int
    compute_dtype: torch.dtype
    keeps_input: bool
    keeps_weight: bool
    needs_grad: bool

    @property
    def factors(self) -> WeightFactors | None:
        if self.u is None or self.s is None or self.v is None:
            return None
        return WeightFactors(self.u, self.s, self.v)

    @property
    def keys(self) -> Tensor | None:
        """What `draw_keys` returned, for `captured_linear`."""
        return self.step if self.step is not None and self.step.dim() else None


def _run_forward(*values: Any) -> list[Tensor]:
    given = _ForwardArguments(*values)
    layer = _layer(given.handle)
    if given.keys is None:
        use = layer.begin_use(None if given.step is None else int(given.step))
        context = layer.context(use, compute_dtype=given.compute_dtype, needs_grad=given.needs_grad)
    else:
        context = _captured_context(layer, given.keys, given.compute_dtype, needs_grad=given.needs_grad)
    result = forward_products(
        context,
        given.input,
        given.weight,
        given.bias,
        given.factors,
        keeps_input=given.keeps_input,
        keeps_weight=given.keeps_weight,
    )
    if not given.needs_grad:
        return [result.output]
    parts = parts_of(result.input, is_shared=False)
    parts += parts_of(result.weight, is_shared=context.weights is not None)
    return [result.output, *([_SavedHandle.tensor(use, layer)] if given.keys is None else []), *parts]


def _fake_forward(*values: Any) -> list[Tensor]:
    given = _ForwardArguments(*values)
    layer, input, weight = _layer(given.handle), given.input, given.weight
    outputs = [input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=given.compute_dtype)]
    if given.needs_grad and given.keys is None:
        outputs.append(torch.empty(SAVED_LENGTH, dtype=torch.int64, device="cpu"))
    if given.keeps_input:
        kept = template(layer.recipe, "input", layer.sizes, input.shape, input.dtype, weight.shape)
        outputs += kept.empty_parts(input)
    if given.keeps_weight:
        kept = template(layer.recipe, "weight", layer.sizes, weight.shape, weight.dtype, input.shape)
        outputs += kept.empty_parts(weight)
    return outputs


class _BackwardArguments(NamedTuple):
    """Arguments of the backward operators; `saved` is the saved handle, or keys, and then the kept parts."""

    grad_output: Tensor
    saved: list[Tensor]
    factors: list[Tensor]
    handle: int
    compute_dtype: torch.dtype
    input_shape: list[int]
    weight_shape: list[int]
    input_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    needs_weight: bool
    needs_input: bool


def _run_backward(*values: Any) -> list[Tensor]:
    given = _BackwardArguments(*values)
    layer = _layer(given.handle)
    if given.handle != layer.handle:
        raise UserError(
            f"the recipe of {layer.title} was changed between a compiled forward and its backward: "
            "change it after backward"
        )
    first, *parts = given.saved
    if first.dim() == 2:
        context = _captured_context(layer, first, given.compute_dtype, needs_grad=True)
    else:
        step, number, is_replay, is_training = first.tolist()
        use = Use(step, number, bool(is_replay), bool(is_training))
        context = layer.context(use, compute_dtype=given.compute_dtype, needs_grad=True)
    input = weight = None
    input_shape, weight_shape = given.input_shape, given.weight_shape
    if given.needs_weight:
        kept = template(layer.recipe, "input", layer.sizes, input_shape, given.input_dtype, weight_shape)
        input, parts = kept.filled(parts)
    if given.needs_input:
        kept = template(layer.recipe, "weight", layer.sizes, weight_shape, given.weight_dtype, input_shape)
        weight, _ = kept.filled(parts)
    gradients = backward_products(
        context,
        given.grad_output,
        input,
        weight,
        WeightFactors(*given.factors) if given.factors else None,
        in_features=given.weight_shape[1],
        dtypes=Dtypes(given.input_dtype, given.weight_dtype, given.bias_dtype),
        needs_bias=given.bias_dtype is not None,
    )
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _fake_backward(*values: Any) -> list[Tensor]:
    given = _BackwardArguments(*values)
    new_empty, gradients = given.grad_output.new_empty, []
    if given.needs_input:
        gradients.append(new_empty(given.input_shape, dtype=given.input_dtype))
    if given.needs_weight:
        gradients.append(new_empty(given.weight_shape, dtype=given.weight_dtype))
    if given.bias_dtype is not None:
        gradients.append(new_empty((given.weight_shape[0],), dtype=given.bias_dtype))
    if given.needs_weight:
        gradients += [torch.empty_like(part, memory_format=torch.contiguous_format) for part in given.factors]
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = _ForwardArguments(*inputs)
    factors, bias = given.factors or (), given.bias
    ctx.num_factors, ctx.handle, ctx.compute_dtype = len(factors), given.handle, given.compute_dtype
    ctx.input_shape, ctx.weight_shape = given.input.shape, given.weight.shape
    bias_dtype = bias.dtype if bias is not None and bias.requires_grad else None
    ctx.dtypes = Dtypes(given.input.dtype, given.weight.dtype, bias_dtype)
    ctx.needs = given.keeps_input, given.keeps_weight
    ctx.backward = _backward if given.keys is None else _captured_backward
    if given.needs_grad:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*factors, *([] if given.keys is None else [given.keys]), *output[1:])


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of `_forward`'s arguments."""
    check_backward(grads[0], "a low-bit layer", PLAIN_LAYER)
    grad_output, (needs_weight, needs_input) = grads[0], ctx.needs
    wanted = [needs_input, needs_weight, ctx.dtypes.bias is not None]
    wanted += [ctx.num_factors and needs_weight] * 3
    found: list[Tensor | None] = [None] * len(wanted)
    if grad_output is not None and any(wanted):
        saved = ctx.saved_tensors  # once: checkpointing computes them when they are asked for
        gradients = iter(
            ctx.backward(
                grad_output,
                list(saved[ctx.num_factors :]),
                list(saved[: ctx.num_factors]),
                ctx.handle,
                ctx.compute_dtype,
                list(ctx.input_shape),
                list(ctx.weight_shape),
                *ctx.dtypes,
                needs_weight,
                needs_input,
            )
        )
        found = [next(gradients) if is_wanted else None for is_wanted in wanted]
    return (*found, None, None, None, None, None, None)


def _forward_operator(name: str, tags: Sequence[torch.Tag]) -> CustomOpDef:
    schema = (
        "(Tensor input, Tensor weight, Tensor? bias, Tensor? u, Tensor? s, Tensor? v, Tensor? step, "
        "SymInt handle, ScalarType compute_dtype, bool keeps_input, bool keeps_weight, bool needs_grad) "
        "-> Tensor[]"
    )
    made = torch.library.custom_op(name, _run_forward, mutates_args=(), tags=tags, schema=schema)
    made.register_fake(_fake_forward)
    made.register_autograd(_gradients, setup_context=_setup_context)
    return made


def _backward_operator(name: str, tags: Sequence[torch.Tag]) -> CustomOpDef:
    schema = (
        "(Tensor grad_output, Tensor[] saved, Tensor[] factors, SymInt handle, ScalarType compute_dtype, "
        "SymInt[] input_shape, SymInt[] weight_shape, ScalarType input_dtype, ScalarType weight_dtype, "
        "ScalarType? bias_dtype, bool needs_weight, bool needs_input) -> Tensor[]"
    )
    made = torch.library.custom_op(name, _run_backward, mutates_args=(), tags=tags, schema=schema)
    made.register_fake(_fake_backward)
    return made


_forward = _forward_operator("megalowbit::linear", ON_HOST)
_backward = _backward_operator("megalowbit::linear_backward", ON_HOST)
_captured_forward = _forward_operator("megalowbit::captured_linear", ON_DEVICE)
_captured_backward = _backward_operator("megalowbit::captured_linear_backward", ON_DEVICE)
