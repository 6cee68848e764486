"""The candidates of a ladder: which quantisers a product's operands get at each precision.

    output = input · weightᵀ      grad_input = grad_output · weight      grad_weight = grad_outputᵀ · input

A choice names one precision for each product; `recipe_with` turns it into the recipe a layer runs with.
Output gradients are rounded stochastically at every candidate: errors of rounding to nearest would add up in
grad_weight as its signal does, unforeseen by any noise model. A tensor that two products want alike is
quantised once. What the base recipe leaves in high precision stays so at every candidate, as a late switch
wants it.

Not covered: layouts with a copy of its own for each product, splits, Hadamard transforms and GEMMs in FP8 or
FP4. They tie the products of a layer to each other; `check_base` refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.layers.recipe import OPERAND_FIELDS, OWN_GRADIENT, SPLIT_FIELDS, Recipe
from megalowbit.quantize.names import quantizer

PRODUCTS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GRADIENT_FIELD = "q_backward_outputgrad"


class Precision(NamedTuple):
    """One candidate: names of the quantisers for inputs and weights, and for output gradients."""

    operand: str
    gradient: str


# All candidates there are, cheapest first. Scales: one a tensor; `nvfp4` has one for 16 elements besides,
# `mixed` one for 128, whose sign says whether they are INT8 or E5M2.
PRECISIONS = MappingProxyType(
    {
        "int4": Precision("int4", "int4:sr"),
        "nvfp4": Precision("nvfp4e2m1bnosr", "nvfp4e2m1b"),
        "int8": Precision("int8", "int8:sr"),
        "mixed": Precision("int8e5m2b", "int8e5m2b:sr"),
        "fp8": Precision("fp8e4m3", "fp8e5m2:sr"),
        "bf16": Precision("fp32", "fp32"),
    }
)


@functools.lru_cache(maxsize=64)
def quantizers_of(precision: str, product: str) -> tuple[str, str]:
    """Quantiser names of a product's left and right operand, in the order of `OPERANDS`.

    Raises:
        UserError: there is no such precision or product.
    """
    candidate = _precision(precision)
    if product not in OPERANDS:
        raise unknown_name("product", product, PRODUCTS)
    left, right = OPERANDS[product]
    return _quantizer_of(candidate, left), _quantizer_of(candidate, right)


def recipe_with(base: Recipe, choice: Sequence[str]) -> Recipe:
    """The base recipe with its products at the chosen precisions.

    Args:
        base: what a layer would run without speculation; `check_base` accepts it.
        choice: names of precisions, in the order of `PRODUCTS`.

    Returns:
        A recipe called after base and choice: "speculative-int8, int8/int8/bf16". Equal arguments give the
        same object.

    Raises:
        UserError: a precision is unknown, or there is not one for each product.
    """
    return _recipe_with(base, tuple(choice))


@functools.lru_cache(maxsize=1024)
def _recipe_with(base: Recipe, choice: tuple[str, ...]) -> Recipe:
    if len(choice) != len(PRODUCTS):
        raise UserError(f"a choice names a precision for each of {', '.join(PRODUCTS)}, not {shown(choice)}")
    output, grad_input, grad_weight = map(_precision, choice)
    wanted = {
        "q_forward_input": output.operand,
        "q_forward_weight": output.operand,
        "q_backward_weight": grad_input.operand,
        "q_backward_input": grad_weight.operand,
        GRADIENT_FIELD: grad_input.gradient,
    }
    changes: dict[str, Any] = {
        field: name for field, name in wanted.items() if not _is_identity(getattr(base, field))
    }
    # the base may leave the gradient alone in one of its two products only
    for_weight = base.outputgrad_for_weight
    if not _is_identity(for_weight):
        for_weight = grad_weight.gradient
    is_shared = for_weight == changes.get(GRADIENT_FIELD, base.q_backward_outputgrad)
    changes[OWN_GRADIENT] = None if is_shared else for_weight
    return replace(base, name=f"{base.name}, {'/'.join(choice)}", **changes)


def check_base(recipe: Recipe) -> None:
    """Refuse a recipe whose products cannot each have a precision of their own.

    Raises:
        UserError: it quantises nothing, splits operands or weights, has copies for each product, a Hadamard
            transform or GEMMs in other than bf16, or repeats another repository's arithmetic.
    """
    begin = f"speculation cannot choose precisions for recipe {recipe.name!r}:"
    if not recipe.quantizes:
        raise UserError(
            f'{begin} it quantises nothing; set recipe to "speculative-int8", or leave speculation out'
        )
    for field in SPLIT_FIELDS:
        if getattr(recipe, field) is not None:
            raise UserError(f"{begin} {field} splits what a product would get; set {field} to null")
    if recipe.hadamard:
        raise UserError(
            f"{begin} hadamard transforms what a product would get; set hadamard to false and layout to "
            '"single_copy"'
        )
    if recipe.layout != "single_copy":
        raise UserError(
            f"{begin} layout {recipe.layout!r} needs blocks along the axis summed over, which most "
            'precisions have not; set layout to "single_copy"'
        )
    if recipe.gemm != "bf16":
        raise UserError(f'{begin} gemm {recipe.gemm!r} multiplies one format only; set gemm to "bf16"')
    for field in (*OPERAND_FIELDS, OWN_GRADIENT):
        name = getattr(recipe, field)
        if name is not None and "seed_compat" in name.split(":"):
            raise UserError(
                f"{begin} {field} = {name!r} repeats another repository's arithmetic, which no rung has; "
                'name another quantizer, or set recipe to "speculative-int8"'
            )


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise unknown_name("precision", name, PRECISIONS)
    return PRECISIONS[name]


def _quantizer_of(candidate: Precision, operand: str) -> str:
    return candidate.gradient if operand == "grad_output" else candidate.operand


def _is_identity(name: str) -> bool:
    return quantizer(name).is_identity
