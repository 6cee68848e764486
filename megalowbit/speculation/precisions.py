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
from dataclasses import dataclass, replace
from typing import Any

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.layers.recipe import OPERAND_FIELDS, OWN_GRADIENT, SPLIT_FIELDS, Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.speculation.settings import BITS

PRODUCTS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GRADIENT_FIELD = "q_backward_outputgrad"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One candidate.

    Attributes:
        name: what users type.
        bits: of one element, without scales.
        operand: quantiser name for inputs and weights.
        gradient: quantiser name for output gradients.
    """

    name: str
    bits: int
    operand: str
    gradient: str


def precisions() -> dict[str, Precision]:
    """All candidates there are, cheapest first.

    | name    | inputs, weights    | output gradients | scales                                              |
    |---------|--------------------|------------------|-----------------------------------------------------|
    | `int4`  | INT4               | INT4 stochastic  | one a tensor                                        |
    | `nvfp4` | NVFP4              | NVFP4 stochastic | one a tensor, one for 16 elements                   |
    | `int8`  | INT8               | INT8 stochastic  | one a tensor                                        |
    | `mixed` | INT8 or E5M2       | …, stochastic    | one for 128 elements, whose sign says which of both |
    | `fp8`   | E4M3               | E5M2 stochastic  | one a tensor                                        |
    | `bf16`  | not quantised      | not quantised    | none                                                |
    """
    quantizers = {
        "int4": ("int4", "int4:sr"),
        "nvfp4": ("nvfp4e2m1bnosr", "nvfp4e2m1b"),
        "int8": ("int8", "int8:sr"),
        "mixed": ("int8e5m2b", "int8e5m2b:sr"),
        "fp8": ("fp8e4m3", "fp8e5m2:sr"),
        "bf16": ("fp32", "fp32"),
    }
    return {
        name: Precision(name=name, bits=BITS[name], operand=operand, gradient=gradient)
        for name, (operand, gradient) in quantizers.items()
    }


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
    known = precisions()
    if name not in known:
        raise unknown_name("precision", name, known)
    return known[name]


def _quantizer_of(candidate: Precision, operand: str) -> str:
    return candidate.gradient if operand == "grad_output" else candidate.operand


def _is_identity(name: str) -> bool:
    return quantizer(name).is_identity
