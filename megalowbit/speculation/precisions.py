"""The candidate precisions: which quantizers a product's operands get at each of them.

    output = input · weightᵀ      grad_input = grad_output · weight      grad_weight = grad_outputᵀ · input

A choice names one precision for each product; `recipe_with` turns it into the recipe a layer runs with.
Output gradients are rounded stochastically at every candidate. With rounding to nearest, their errors would
add up coherently in grad_weight, as its signal does, and no noise model would predict that. A tensor that two
products take in the same precision is quantised once. Operands that the base recipe leaves in high precision
stay there at every candidate, which also keeps a late switch in force.

Not supported: layouts with a separate copy for each product, splits, Hadamard transforms, and GEMMs in FP8 or
FP4. They make the products of a layer depend on each other; `check_base` rejects them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.layers.layer_recipe import OPERAND_FIELDS, OWN_GRADIENT, SPLIT_FIELDS
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer

PRODUCTS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GRADIENT_FIELD = "q_backward_outputgrad"


class Precision(NamedTuple):
    """One candidate: the quantizer of inputs and weights, and that of output gradients."""

    operand: str
    gradient: str


# All candidates, cheapest first. Each has one scale per tensor, except that `nvfp4` also has one per 16
# elements, and `mixed` has one per 128 elements, whose sign says whether they are INT8 or E5M2.
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


def operand_quantizer(precision: str, operand: str) -> str:
    """The name of the quantizer of `"input"`, `"weight"` or `"grad_output"`.

    Raises:
        UserError: there is no such precision.
    """
    candidate = _precision(precision)
    return candidate.gradient if operand == "grad_output" else candidate.operand


def recipe_with(base: Recipe, choice: Sequence[str]) -> Recipe:
    """The base recipe with its products at the chosen precisions.

    Args:
        base: the recipe of a layer without speculation; `check_base` accepts it.
        choice: names of precisions, in the order of `PRODUCTS`.

    Returns:
        A recipe named after base and choice: "speculative-int8, int8/int8/bf16". Equal arguments return the
        same object.

    Raises:
        UserError: a precision is unknown, or their number is not that of the products.
    """
    return _recipe_with(base, tuple(choice))


@functools.lru_cache(maxsize=1024)
def _recipe_with(base: Recipe, choice: tuple[str, ...]) -> Recipe:
    if len(choice) != len(PRODUCTS):
        raise UserError(f"expected a precision for each of {', '.join(PRODUCTS)}, got {shown(choice)}")
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
    # the base recipe may leave the output gradient unquantised in one of its two products only
    for_weight = base.outputgrad_for_weight
    if not _is_identity(for_weight):
        for_weight = grad_weight.gradient
    is_shared = for_weight == changes.get(GRADIENT_FIELD, base.q_backward_outputgrad)
    changes[OWN_GRADIENT] = None if is_shared else for_weight
    return replace(base, name=f"{base.name}, {'/'.join(choice)}", **changes)


def check_base(recipe: Recipe) -> None:
    """Reject a recipe for which products cannot have different precisions.

    Raises:
        UserError: the recipe quantises nothing, splits operands or weights, has separate copies for each
            product, a Hadamard transform or a GEMM that is not bf16, or uses `seed_compat`.
    """
    begin = f"speculation cannot choose precisions for recipe {recipe.name!r}:"
    if not recipe.quantizes:
        raise UserError(
            f'{begin} it quantises nothing; set recipe to "speculative-int8", or leave speculation out'
        )
    for field in SPLIT_FIELDS:
        if getattr(recipe, field) is not None:
            raise UserError(f"{begin} {field} splits an operand; set {field} to null")
    if recipe.hadamard:
        raise UserError(
            f'{begin} hadamard transforms operands; set hadamard to false and layout to "single_copy"'
        )
    if recipe.layout != "single_copy":
        raise UserError(
            f"{begin} layout {recipe.layout!r} needs blocks along the summed axis, which most precisions do "
            'not have; set layout to "single_copy"'
        )
    if recipe.gemm != "bf16":
        raise UserError(f'{begin} gemm {recipe.gemm!r} supports one format only; set gemm to "bf16"')
    for field in (*OPERAND_FIELDS, OWN_GRADIENT):
        name = getattr(recipe, field)
        if name is not None and "seed_compat" in name.split(":"):
            raise UserError(
                f"{begin} {field} = {name!r} uses the arithmetic of another repository, which no candidate "
                'does; choose another quantizer, or set recipe to "speculative-int8"'
            )


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise unknown_name("precision", name, PRECISIONS)
    return PRECISIONS[name]


def _is_identity(name: str) -> bool:
    return quantizer(name).is_identity
