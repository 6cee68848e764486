"""What of a recipe's fields does not fit together, found before any layer is built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

if TYPE_CHECKING:
    from megalowbit.layers.recipe import Recipe

LAYOUTS = ("single_copy", "per_gemm")
GEMMS = ("bf16", "fp8", "fp4")
PRODUCTS = {
    "output": ("q_forward_input", "q_forward_weight"),
    "grad_input": ("q_backward_outputgrad", "q_backward_weight"),
    "grad_weight": ("q_backward_outputgrad_for_weight", "q_backward_input"),
}
OPERAND_FIELDS = (
    "q_forward_input",
    "q_forward_weight",
    "q_backward_input",
    "q_backward_weight",
    "q_backward_outputgrad",
)
OWN_GRADIENT = "q_backward_outputgrad_for_weight"  # optional: without it, grad_weight takes grad_input's
_NATIVE_FORMATS: tuple[tuple[str, tuple[int, int] | None], ...] = (("e4m3", (1, 16)), ("e8m0", (1, 32)))


def check_quantizer(recipe: str, field: str, value: object) -> None:
    """Refuse what is no quantizer's name."""
    if not isinstance(value, str):
        raise UserError(f"recipe {recipe!r}: {field} must be a quantizer name, not {shown(value)}")
    try:
        quantizer(value)
    except UserError as error:
        raise UserError(f"recipe {recipe!r}, {field}: {error}") from None


def operand_quantizers(recipe: Recipe, product: str) -> tuple[str, str]:
    """Names of the quantisers of a product's operands, left and right."""
    left, right = (getattr(recipe, field) for field in PRODUCTS[product])
    return left or recipe.q_backward_outputgrad, right  # grad_weight's own may be left out


def check_own_gradient(recipe: Recipe) -> None:
    """Refuse a quantiser of grad_weight's own for the output gradient where it is no name, or has no use."""
    value = recipe.q_backward_outputgrad_for_weight
    if value is None:
        return
    if not isinstance(value, str):
        raise UserError(
            f"recipe {recipe.name!r}: {OWN_GRADIENT} must be a quantizer name or null, not {value!r}"
        )
    quantizer(value)
    for field, needed in (("layout", "single_copy"), ("gemm", "bf16")):
        chosen = getattr(recipe, field)
        if chosen != needed:
            raise UserError(
                f'recipe {recipe.name!r}: {OWN_GRADIENT} goes with {field} "{needed}", not "{chosen}": '
                f'set it to null, or {field} to "{needed}"'
            )


def check_choices(recipe: Recipe) -> None:
    """Refuse a layout, GEMM or flag there is not."""
    for field, choices in (("layout", LAYOUTS), ("gemm", GEMMS)):
        value = getattr(recipe, field)
        if value not in choices:
            raise UserError(f"recipe {recipe.name!r}: {unknown_name(field, value, choices)}")
    if recipe.gemm != "bf16" and not recipe.quantizes:
        raise UserError(
            f'recipe {recipe.name!r}: gemm "{recipe.gemm}" multiplies quantised operands, but the recipe '
            'quantises nothing: name quantizers, or use gemm "bf16"'
        )
    if not isinstance(recipe.hadamard, bool):
        raise UserError(f"recipe {recipe.name!r}: hadamard must be true or false, not {recipe.hadamard!r}")


def _encoding(name: str) -> Encoding | None:
    chosen = quantizer(name)
    return chosen.encoding if isinstance(chosen, BlockQuantizer) else None


def check_hadamard(recipe: Recipe) -> None:
    """Refuse a Hadamard transform without copies or blocks of its own."""
    if not recipe.hadamard:
        return
    if recipe.layout != "per_gemm":
        raise UserError(
            f"recipe {recipe.name!r}: hadamard transforms operands of grad_weight alone, which needs copies "
            'of their own: set layout to "per_gemm"'
        )
    for field in ("q_backward_outputgrad", "q_backward_input"):
        if _encoding(getattr(recipe, field)) is None:
            raise UserError(
                f"recipe {recipe.name!r}: hadamard needs a quantizer with blocks for {field}, not "
                f"{getattr(recipe, field)!r}: choose one, or set hadamard to false"
            )


def check_fp8(recipe: Recipe) -> None:
    """Refuse operands that FP8 does not hold exactly."""
    for field in OPERAND_FIELDS:
        name = getattr(recipe, field)
        encoding = _encoding(name)
        is_mxfp4 = encoding is not None and encoding.format.scale == "e8m0"
        if not quantizer(name).is_identity and not is_mxfp4:
            raise UserError(
                f'recipe {recipe.name!r}: gemm "fp8" holds only MXFP4 operands exactly, but {field} is '
                f'{name!r}: use an mxfp4 quantizer, or gemm "bf16"'
            )


def check_fp4(recipe: Recipe) -> None:
    """Refuse operands that FP4 tensor cores do not take."""
    if recipe.layout != "per_gemm":
        raise UserError(
            f'recipe {recipe.name!r}: gemm "fp4" needs blocks along the axis summed over: '
            'set layout to "per_gemm"'
        )
    for product in PRODUCTS:
        names = operand_quantizers(recipe, product)
        if all(quantizer(name).is_identity for name in names):
            continue
        formats = [None if encoding is None else encoding.format for encoding in map(_encoding, names)]
        fits = all(
            format is not None and (format.scale, format.block) in _NATIVE_FORMATS for format in formats
        )
        if not fits or formats[0] != formats[1]:
            raise UserError(
                f'recipe {recipe.name!r}: gemm "fp4" multiplies NVFP4 (1 × 16) or MXFP4 by the same, but '
                f'{product} has {names[0]!r} and {names[1]!r}: choose such a pair, or gemm "bf16"'
            )


def patterns(name: str, keep: object) -> tuple[str, ...]:
    """The patterns of a recipe's `keep`, checked."""
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise UserError(f"recipe {name!r}: keep must be a list of module name patterns, not {keep!r}")
    patterns = tuple(keep)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: keep holds {pattern!r}: expected a module name pattern")
    return patterns


def check_blocks(recipe: Recipe) -> None:
    """Refuse numbers of blocks to keep that are neither a number nor a share."""
    for field in ("keep_first", "keep_last"):
        value = getattr(recipe, field)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        is_share = isinstance(value, float) and math.isfinite(value) and 0 <= value < 1
        if not is_count and not is_share:
            raise UserError(
                f"recipe {recipe.name!r}: {field} = {shown(value)}: expected a number of blocks, or their "
                "share between 0 and 1"
            )


def check_splits(recipe: Recipe) -> None:
    """Refuse splits of operands that are not quantised, or split twice."""
    for field, quantizers in (
        ("split_input", ("q_forward_input", "q_backward_input")),
        ("split_weight", ("q_forward_weight", "q_backward_weight")),
        ("split_grad_output", ("q_backward_outputgrad", OWN_GRADIENT)),
    ):
        split = getattr(recipe, field)
        if split is None:
            continue
        names = [name for name in quantizers if getattr(recipe, name) is not None]
        if all(quantizer(getattr(recipe, name)).is_identity for name in names):
            raise UserError(
                f"recipe {recipe.name!r}: {field} splits what is not quantised: name a quantizer for "
                f"{' or '.join(names)}, or set {field} to null"
            )
        if field == "split_weight" and split.broadcast_dim is not None:
            raise UserError(f"recipe {recipe.name!r}: split_weight has no slices: set broadcast_dim to null")
    if recipe.parameter_split is not None and recipe.split_weight is not None:
        raise UserError(
            f"recipe {recipe.name!r}: split_weight and parameter_split both split the weight: "
            "set one of them to null"
        )
    if recipe.parameter_split is not None and not recipe.quantizes:
        raise UserError(
            f"recipe {recipe.name!r}: parameter_split needs layers that quantise: name quantizers"
        )
