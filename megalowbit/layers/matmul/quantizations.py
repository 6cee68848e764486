"""The quantisations that a recipe's three products need: operand, quantizer and block axis.

    product        left                            right
    output         input                           weight
    grad_input     grad_output                     backward_weight
    grad_weight    grad_output_for_weight          backward_input

An operand is stored row-major with blocks along its last axis: input (M, K) along K, weight (N, K) along K,
grad_output (M, N) along N. If `is_transposed`, it is stored as its transpose, and the blocks run along its
original rows: inputᵀ (K, M) and grad_outputᵀ (N, M) along the tokens, weightᵀ (K, N) along N.

If one set of codes serves two products (most recipes with the layout "single_copy"), both entries are the
same quantisation. All code that needs to know what is quantised reads it here: forward and backward, saving,
the exchange of amax between tensor-parallel ranks, and the check of sizes.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import NamedTuple

from megalowbit.layers.layer_recipe import PRODUCTS
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer

OPERANDS = MappingProxyType(  # role of a quantisation (part of its random key) → the operand
    {
        "input": "input",
        "input_split": "input",
        "backward_input": "input",
        "weight": "weight",
        "weight_split": "weight",
        "backward_weight": "weight",
        "grad_output": "grad_output",
        "grad_output_split": "grad_output",
        "grad_output_transposed": "grad_output",
        "grad_output_for_weight": "grad_output",
    }
)


class Quantization(NamedTuple):
    """One quantisation of an operand.

    Attributes:
        role: distinguishes the quantisations of one operand; a key of `OPERANDS`.
        name: the quantizer's name.
        field: the recipe field with this name.
        is_transposed: whether blocks run along the operand's rows (tokens, or output features).
        is_transformed: whether the recipe's Hadamard transform applies, along the axis of the blocks.
    """

    role: str
    name: str
    field: str
    is_transposed: bool = False
    is_transformed: bool = False

    @property
    def operand(self) -> str:
        """The operand: "input", "weight" or "grad_output"."""
        return OPERANDS[self.role]

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer."""
        return quantizer(self.name)

    @property
    def masks_gradient(self) -> bool:
        """Whether elements of the operand that it saturates get no gradient."""
        chosen = self.quantizer
        return isinstance(chosen, BlockQuantizer) and chosen.encoding.masks_gradient


class Quantizations(NamedTuple):
    """A recipe's quantisations by product and side, see the table above."""

    input: Quantization
    weight: Quantization
    backward_input: Quantization
    backward_weight: Quantization
    grad_output: Quantization
    grad_output_for_weight: Quantization

    @classmethod
    def of(cls, recipe: Recipe) -> Quantizations:
        """The quantisations of a recipe."""
        is_per_gemm = recipe.layout == "per_gemm"
        of_output, of_input, of_weight = (product in recipe.transformed_products for product in PRODUCTS)
        input = Quantization("input", recipe.q_forward_input, "q_forward_input", False, of_output)
        weight = Quantization("weight", recipe.q_forward_weight, "q_forward_weight", False, of_output)
        grad_output = Quantization(
            "grad_output", recipe.q_backward_outputgrad, "q_backward_outputgrad", False, of_input
        )
        backward_input, backward_weight, for_weight = input, weight, grad_output
        if is_per_gemm or recipe.q_backward_input != input.name:
            backward_input = Quantization(
                "backward_input", recipe.q_backward_input, "q_backward_input", is_per_gemm, of_weight
            )
        if not _serves_backward(recipe):
            backward_weight = Quantization(
                "backward_weight", recipe.q_backward_weight, "q_backward_weight", is_per_gemm, of_input
            )
        if is_per_gemm:
            for_weight = Quantization(
                "grad_output_transposed", grad_output.name, grad_output.field, True, of_weight
            )
        elif recipe.outputgrad_for_weight != grad_output.name:
            field = "q_backward_outputgrad_for_weight"
            for_weight = Quantization("grad_output_for_weight", recipe.outputgrad_for_weight, field)
        return cls(input, weight, backward_input, backward_weight, grad_output, for_weight)


@functools.lru_cache(maxsize=256)
def quantizations_of(recipe: Recipe) -> Quantizations:
    """`Quantizations.of`, made once for a recipe, because each use of a layer needs them."""
    return Quantizations.of(recipe)


@functools.lru_cache(maxsize=1024)
def needs_exponents(recipe: Recipe, name: str) -> bool:
    """Whether products on FP8 tensor cores read the range of this quantizer's exponents."""
    return recipe.gemm == "fp8" and scale_format(name) == "e8m0"


def scale_format(name: str) -> str | None:
    """The format of a quantizer's scales; `None` if it packs nothing."""
    chosen = quantizer(name)
    return chosen.encoding.format.scale if isinstance(chosen, BlockQuantizer) else None


def _serves_backward(recipe: Recipe) -> bool:
    """Whether the codes that forward made of the weight serve backward as well."""
    is_same = recipe.q_forward_weight == recipe.q_backward_weight
    if {"output", "grad_input"} & set(recipe.transformed_products):  # each along another axis
        return False
    return is_same and (recipe.layout == "single_copy" or serves_both_axes(recipe.q_forward_weight))


def serves_both_axes(name: str) -> bool:
    """Whether transposing a matrix transposes its codes: with square blocks, or one scale for the tensor."""
    chosen = quantizer(name)
    if chosen.is_identity:
        return True
    if not isinstance(chosen, BlockQuantizer):
        return False
    block = chosen.encoding.format.block
    return block is None or block[0] == block[1]
