"""What layers cost under their recipes: the bytes kept for backward, and the time of their products.

Bytes are those that training keeps on any machine, in bfloat16. Siblings (`layers.siblings`) share an input
that they quantise in the same way, or not at all, so bytes are those of all layers together. An input in high
precision counts also if it is there anyway: because another operation keeps it, as attention may keep the
input of its output projection, or because a sibling outside of the plan does.

Time is that of a GPU with the units of a B200, which multiplies 8-bit operands twice and FP4 operands four
times as fast as bf16 ones (dense peaks in `telemetry/peak_tflops.py`). It counts as if there were units for
every pair of formats, the wider one deciding, and for every layout. Rounding, Hadamard transforms and
factorisations are not counted. On a GPU that emulates FP4 all recipes take about as long.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Literal, NamedTuple, get_args

import torch

from megalowbit.layers.layer_recipe import PRODUCTS, operand_quantizers
from megalowbit.layers.matmul.quantizations import quantizations_of
from megalowbit.layers.matmul.saved import template
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.siblings import shares_input
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

CostKind = Literal["weights", "bytes", "time"]
COSTS: tuple[CostKind, ...] = get_args(CostKind)
SPEEDS = {4: 4.0, 8: 2.0, 16: 1.0}  # bits of the wider operand → products per time, relative to bf16
SPLITS = {  # product → the splits of its left and right operand
    "output": ("split_input", "split_weight"),
    "grad_input": ("split_grad_output", "split_weight"),
    "grad_weight": ("split_grad_output", "split_input"),
}


class LayerCost(NamedTuple):
    """The cost of a layer.

    Attributes:
        own: of the layer alone.
        shared: (what, cost) of the input that siblings share: counted once for all layers with an equal
            `what`. `None`: all is the layer's own.
    """

    own: float
    shared: tuple[Hashable, float] | None = None

    def relative_to(self, whole: float) -> LayerCost:
        """The cost as a share."""
        shared = None if self.shared is None else (self.shared[0], self.shared[1] / whole)
        return LayerCost(self.own / whole, shared)


def total(costs: Iterable[LayerCost]) -> float:
    """The cost of several layers together."""
    costs = list(costs)
    shared = dict(each.shared for each in costs if each.shared is not None)
    return sum(each.own for each in costs) + sum(shared.values())


def layer_cost(
    kind: CostKind, recipe: Recipe, sizes: tuple[int, int], tokens: int, siblings: tuple[str, ...] = ()
) -> LayerCost:
    """The cost of a layer; "weights" is their number, whatever the recipe. Arguments as for `bytes_kept`."""
    if kind == "bytes":
        return bytes_kept(recipe, sizes, tokens, siblings)
    return LayerCost(product_time(recipe, sizes, tokens) if kind == "time" else math.prod(sizes))


def bytes_kept(
    recipe: Recipe, sizes: tuple[int, int], tokens: int, siblings: tuple[str, ...] = ()
) -> LayerCost:
    """Bytes that a layer keeps between its forward and its backward: input and weight, factors and masks.

    A weight that is not quantised costs nothing, because the parameter is there anyway.

    Args:
        recipe: of the layer.
        sizes: (in_features, out_features).
        tokens: of a micro-batch.
        siblings: names of the layers that read the same input; empty if there are none.
    """
    shapes = {"input": (tokens, sizes[0]), "weight": (sizes[1], sizes[0])}
    input, mask_of_weight = _bytes_of(recipe, "input", sizes, shapes["input"], shapes["weight"])
    weight, mask_of_input = _bytes_of(recipe, "weight", sizes, shapes["weight"], shapes["input"])
    kept = quantizations_of(recipe)
    own = mask_of_weight + mask_of_input
    own += 0 if kept.backward_weight.quantizer.is_identity else weight
    is_plain = kept.backward_input.quantizer.is_identity
    if not siblings or not (is_plain or shares_input(recipe)):
        return LayerCost(own + input)
    form = None if is_plain else (kept.backward_input, recipe.split_input, recipe.gemm)
    return LayerCost(own, ((siblings, form), input))


def product_time(recipe: Recipe, sizes: tuple[int, int], tokens: int) -> float:
    """Time of a layer's three products, in multiply-adds at the speed of bf16.

    A split operand adds the products with its two factors, at the speed of bf16. The arguments are those of
    `bytes_kept`.
    """
    done = multiply_adds(recipe, sizes, tokens)
    return sum(count / SPEEDS[bits] for bits, count in done.items())


def multiply_adds(recipe: Recipe, sizes: tuple[int, int], tokens: int) -> dict[int, int]:
    """Multiply-adds of a layer's three products and of its splits, by the bits of the wider operand.

    The arguments are those of `bytes_kept`.
    """
    in_features, out_features = sizes
    shapes = {  # rows, sum, columns
        "output": (tokens, in_features, out_features),
        "grad_input": (tokens, out_features, in_features),
        "grad_weight": (out_features, tokens, in_features),
    }
    found = dict.fromkeys(SPEEDS, 0)
    for product in PRODUCTS:
        rows, inner, cols = shapes[product]
        names = operand_quantizers(recipe, product)
        found[max(map(_bits, names))] += rows * inner * cols
        for field, name, other in zip(SPLITS[product], names, (cols, rows), strict=True):
            split = getattr(recipe, field)
            if split is not None and not quantizer(name).is_identity:  # otherwise the operand is not split
                found[16] += split.rank_of(*sizes) * (inner * other + rows * cols)
    return found


def _bytes_of(
    recipe: Recipe, operand: str, sizes: tuple[int, int], shape: tuple[int, int], other: tuple[int, int]
) -> tuple[int, int]:
    """Bytes of a kept operand, and of the mask that is kept beside it."""
    kept = template(recipe, operand, sizes, shape, torch.bfloat16, other)
    found = [math.prod(size) * dtype.itemsize for size, dtype in kept.shapes]
    mask = found.pop() if kept.operand.gradient_mask is not None else 0
    return sum(found), mask


def _bits(name: str) -> int:
    """Bits of the units that multiply a quantizer's elements."""
    chosen = quantizer(name)
    if chosen.is_identity:
        return 16
    if not isinstance(chosen, BlockQuantizer):  # of the Metis repository
        return 8 if name.startswith(("fp6", "fp8")) else 4
    return 4 if chosen.encoding.format.element.bits <= 4 else 8
