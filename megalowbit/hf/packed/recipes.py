"""Which recipes, layers and sizes the packed layouts can hold; all others are refused in one line.

A server multiplies codes · block scales · tensor scale with inputs that it rounds as its layout says, or not
at all. A recipe fits if its forward does the same. Its backward does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.siblings import find_siblings
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

Precision = Literal["w4a16", "w4a4"]
PRECISIONS: tuple[Precision, ...] = ("w4a16", "w4a4")


class PackedFormat(NamedTuple):
    """A number format of packed weights.

    Attributes:
        name: `nvfp4` or `mxfp4`.
        block_size: elements that share a scale.
        quantizer: of the weights in the forward.
        input_encoding: of the inputs that the server rounds; None: it does not round them.
    """

    name: Literal["nvfp4", "mxfp4"]
    block_size: int
    quantizer: BlockQuantizer
    input_encoding: Encoding | None = None


def check_formats(recipe: Recipe, precision: Precision) -> None:
    """Reject a recipe if layers cannot be packed with any of its variants; the model may have only some.

    Raises:
        UserError: see `packed_format`.
    """
    mistakes = []
    for each in recipe.variants:
        try:
            packed_format(each, precision)
            return
        except UserError as error:
            if each.quantizes or not recipe.quantizes:
                mistakes.append(error)
    raise mistakes[0]


def packed_format(recipe: Recipe, precision: Precision) -> PackedFormat:
    """How the layers of a recipe are packed.

    Raises:
        UserError: no layout can hold what the recipe does in the forward.
    """
    chosen = quantizer(recipe.q_forward_weight)
    if recipe.parameter_split is not None or recipe.split_weight is not None:
        field = "parameter_split" if recipe.split_weight is None else "split_weight"
        raise _refused(recipe, f"{field} adds a low-rank part to the weight, which servers do not multiply")
    if "output" in recipe.transformed_products:
        raise _refused(recipe, "its weights are Hadamard-transformed in the forward (hadamard: output)")
    if chosen.is_identity:
        raise _refused(recipe, "it quantises no weight in the forward")
    encoding = chosen.encoding if isinstance(chosen, BlockQuantizer) else None
    name = _format_of(encoding)
    if encoding is None or name is None or not isinstance(chosen, BlockQuantizer):
        raise _refused(recipe, f"the weight quantizer {recipe.q_forward_weight!r} is neither NVFP4 nor MXFP4")
    if encoding.is_stochastic:
        raise _refused(
            recipe,
            f"the weight quantizer {recipe.q_forward_weight!r} draws other codes at each micro-batch, so "
            "there are none to serve",
        )
    size = 16 if name == "nvfp4" else 32
    return PackedFormat(name, size, chosen, _input_encoding(recipe, name) if precision == "w4a4" else None)


def bits_of_weights(recipe: Recipe) -> int | None:
    """Bits of an element of the forward's weights; 16 if they are not rounded, None if they have no codes."""
    chosen = quantizer(recipe.q_forward_weight)
    if chosen.is_identity:
        return 16
    return chosen.encoding.format.element.bits if isinstance(chosen, BlockQuantizer) else None


def fused_groups(in_features: Mapping[str, int], low_bit: Collection[str]) -> list[tuple[str, ...]]:
    """The low-bit layers in groups that servers fuse, in the model's order; most are groups of one layer.

    Args:
        in_features: of all linear layers by name.
        low_bit: names of those that are packed.

    Raises:
        UserError: a group is packed only in part.
    """
    siblings = find_siblings(in_features)
    groups = []
    for name in low_bit:
        group = siblings.get(name, (name,))
        kept = [other for other in group if other not in low_bit]
        if kept:
            raise UserError(
                f"servers fuse {name}, which is packed, with {kept[0]}, which stays in bf16: give both the "
                "same recipe, or keep both in high precision"
            )
        if group[0] == name:
            groups.append(group)
    return groups


def check_size(layer: str, in_features: int, format: PackedFormat) -> None:
    """Reject a layer whose rows are not whole blocks.

    Raises:
        UserError: names the layer and its size.
    """
    if in_features % format.block_size:
        raise UserError(
            f"layer {layer} has {in_features} input features, and servers read {format.name.upper()} weights "
            f"in whole blocks of {format.block_size} only: keep it in high precision (the recipe's keep)"
        )


def _format_of(encoding: Encoding | None) -> Literal["nvfp4", "mxfp4"] | None:
    if encoding is None:
        return None
    if encoding.format in (NVFP4, NVFP4_TILED):
        return "nvfp4"
    return "mxfp4" if encoding.format == MXFP4 else None


def _input_encoding(recipe: Recipe, name: str) -> Encoding:
    """The encoding of the inputs, if a server rounds them in the same way.

    Raises:
        UserError: it does not.
    """
    given = recipe.q_forward_input
    remedy = 'leave inputs unrounded (precision "w4a16", or --inputs none)'
    if recipe.split_input is not None:
        raise _refused(recipe, "split_input adds a low-rank part, which servers do not multiply", remedy)
    chosen = quantizer(given)
    encoding = chosen.encoding if isinstance(chosen, BlockQuantizer) else None
    if encoding is None or encoding.format not in (NVFP4, MXFP4) or _format_of(encoding) != name:
        raise _refused(recipe, f"servers round inputs to {name.upper()}, and it to {given!r}", remedy)
    has_other_scales = encoding.four_over_six or encoding.q_scalar != 1 or _rounds_scales_otherwise(encoding)
    if encoding.is_stochastic or has_other_scales:
        raise _refused(recipe, f"servers do not round inputs as {given!r} does", remedy)
    return encoding


def _rounds_scales_otherwise(encoding: Encoding) -> bool:
    """Whether block scales are rounded in another way than in the recipes `nvfp4` and `mxfp4`."""
    return encoding.scale_rounding != ("nearest" if encoding.format == NVFP4 else "up")


def _refused(
    recipe: Recipe, reason: str, remedy: str = "use one like nvfp4, or an ordinary Hugging Face folder"
) -> UserError:
    return UserError(f"recipe {recipe.name!r} cannot be packed, {reason}: {remedy}")
