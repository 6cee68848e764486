"""What a layer costs under a recipe: the bytes that it keeps for backward, and the time of its products.

Bytes are those that training keeps on any machine. Time is that of a GPU with the units of a B200, which
multiplies 8-bit operands twice and FP4 operands four times as fast as bf16 ones (dense peaks in
`telemetry/peak_tflops.py`); rounding and factorisations are not counted. On a GPU that emulates FP4 all
recipes take about as long.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from megalowbit.layers.layer_recipe import PRODUCTS, operand_quantizers
from megalowbit.layers.matmul.quantizations import Quantization, quantizations_of
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

CostKind = Literal["weights", "bytes", "time"]
COSTS: tuple[CostKind, ...] = get_args(CostKind)
SPEEDS = {4: 4.0, 8: 2.0, 16: 1.0}  # bits of the wider operand → products per time, relative to bf16
UNROUNDED = 2  # bytes of an element in the model's precision
SAMPLE = 128  # rows and columns of a matrix from which the bytes of an element are taken
SPLITS = {  # product → the splits of its left and right operand
    "output": ("split_input", "split_weight"),
    "grad_input": ("split_grad_output", "split_weight"),
    "grad_weight": ("split_grad_output", "split_input"),
}


def num_weights(recipe: Recipe, sizes: tuple[int, int], tokens: int) -> int:  # noqa: ARG001 - as the other costs
    """Number of a layer's weights, whatever its recipe."""
    return sizes[0] * sizes[1]


def bytes_kept(recipe: Recipe, sizes: tuple[int, int], tokens: int) -> float:
    """Bytes that a layer keeps between its forward and its backward: input and weight, with their factors.

    A weight that is not quantised costs nothing, because the parameter is there anyway.

    Args:
        recipe: of the layer.
        sizes: (in_features, out_features).
        tokens: of a micro-batch.
    """
    in_features, out_features = sizes
    made = quantizations_of(recipe)
    total = tokens * in_features * _bytes_of_element(made.backward_input, UNROUNDED)
    total += out_features * in_features * _bytes_of_element(made.backward_weight, 0)
    for split, rows in ((recipe.split_input, tokens), (recipe.split_weight, out_features)):
        if split is not None and split.method != "mean":
            of_factor = _bytes_of_name(split.q_factors)
            total += (rows + in_features) * split.rank_of(*sizes) * of_factor
    return total


def product_time(recipe: Recipe, sizes: tuple[int, int], tokens: int) -> float:
    """Time of a layer's three products, in multiply-adds at the speed of bf16.

    A split operand adds the products with its two factors, at the speed of bf16. The arguments are those of
    `bytes_kept`.
    """
    in_features, out_features = sizes
    shapes = {  # rows, sum, columns
        "output": (tokens, in_features, out_features),
        "grad_input": (tokens, out_features, in_features),
        "grad_weight": (out_features, tokens, in_features),
    }
    total = 0.0
    for product in PRODUCTS:
        rows, inner, cols = shapes[product]
        total += rows * inner * cols / SPEEDS[max(map(_bits, operand_quantizers(recipe, product)))]
        for field, other in zip(SPLITS[product], (cols, rows), strict=True):
            split = getattr(recipe, field)
            if split is not None:
                total += split.rank_of(*sizes) * (inner * other + rows * cols)
    return total


def _bytes_of_element(quantization: Quantization, unrounded: int) -> float:
    if quantization.quantizer.is_identity:
        return unrounded
    return _bytes_of_name(quantization.name)


def _bytes_of_name(name: str) -> float:
    chosen = quantizer(name)
    if chosen.is_identity:
        return UNROUNDED
    return chosen.quantize(torch.zeros(SAMPLE, SAMPLE)).nbytes / SAMPLE**2


def _bits(name: str) -> int:
    """Bits of the units that multiply a quantizer's elements."""
    chosen = quantizer(name)
    if chosen.is_identity:
        return 16
    if not isinstance(chosen, BlockQuantizer):
        return 4 if name.startswith("fp4") else 8  # of the Metis repository
    return 4 if chosen.encoding.format.element.bits <= 4 else 8
