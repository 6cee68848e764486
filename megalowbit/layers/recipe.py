"""Recipes: the quantizer of each operand of the three products, and the layers left in high precision.

    output      = input · weightᵀ          q_forward_input,       q_forward_weight
    grad_input  = grad_output · weight     q_backward_outputgrad, q_backward_weight
    grad_weight = grad_outputᵀ · input     q_backward_outputgrad, q_backward_input

There are two layouts. `single_copy`: each tensor is quantised once, in blocks along its last axis, and both
products use its codes (transposed if necessary). If the backward quantizer has another name than the forward
one, the tensor is quantised a second time. `per_gemm`: each product gets operands in blocks along the axis it
sums over, as FP4 tensor cores require; `hadamard` then first transforms both operands of some products along
that axis (grad_weight: along the tokens). An operand may be split before it is quantised: into a low-rank
part, whose factors are quantised, and a residual, which the operand's quantizer rounds. Quantizer fields are
named as in the Metis configuration; `q_backward_outputgrad_for_weight` is an addition.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.spectral.settings import FIELDS_READ, OperandSplit, ParameterSplit, block_over, settings_from

LAYOUTS = ("single_copy", "per_gemm")
GEMMS = ("bf16", "fp8", "fp4")
PRODUCTS = {
    "output": ("q_forward_input", "q_forward_weight"),
    "grad_input": ("q_backward_outputgrad", "q_backward_weight"),
    "grad_weight": ("q_backward_outputgrad_for_weight", "q_backward_input"),
}
OPERAND_FIELDS = (
    "q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight", "q_backward_outputgrad",
)  # fmt: skip
OWN_GRADIENT = "q_backward_outputgrad_for_weight"  # optional; default: the quantizer of grad_input
SPLIT_FIELDS = {
    "split_input": OperandSplit,
    "split_weight": OperandSplit,
    "split_grad_output": OperandSplit,
    "parameter_split": ParameterSplit,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The quantizer of each operand, and how the products run; frozen and comparable.

    Attributes:
        name: name in reports.
        q_forward_input: quantizer of the input in `output`.
        q_forward_weight: quantizer of the weight in `output`.
        q_backward_input: quantizer of the input in `grad_weight`.
        q_backward_weight: quantizer of the weight in `grad_input`.
        q_backward_outputgrad: quantizer of the output gradient in `grad_input` and `grad_weight`.
        q_backward_outputgrad_for_weight: another quantizer of the output gradient in `grad_weight`. `null`,
            or the same name: the output gradient is quantised once for both. With `layout` `single_copy` and
            `gemm` `bf16` only.
        keep: patterns (`*`, `?`, `[…]`) of the names of modules, and of weights outside linear layers, that
            stay in high precision, with everything inside them.
        layout: `single_copy`: one set of codes for all three products, which is fastest. `per_gemm`: operands
            in blocks along the axis that each product sums over, the layout that FP4 tensor cores execute.
        hadamard: random Hadamard transform of both operands of these products (`output`, `grad_input`,
            `grad_weight`), along the axis summed over; with `per_gemm` only. `true`: `grad_weight`.
        gemm: `bf16`: emulated exactly. `fp8`: MXFP4 operands on FP8 tensor cores if that is exact, otherwise
            in bf16, and counted. `fp4`: native, on Blackwell; not tested on hardware.
        split_input: low-rank split of the input, see [Operand splits](#operand-splits).
        split_weight: the same for the weight, at each use ("in-time split"); the parameter does not change.
        split_grad_output: the same for the output gradient.
        parameter_split: split of weights into parameters between steps, see
            [Parameter split](#parameter-split).
        keep_first: blocks at the beginning of the model that stay in high precision: a number (`2`), or a
            fraction of all blocks below 1 (`0.15`).
        keep_last: the same at the end of the model.
        keep_if_present: as `keep`, but a pattern may match nothing: recipes for several model families name
            the layers of each.

    Raises:
        UserError: a quantizer is unknown, `keep` is not a list of strings, or fields cannot be combined.
    """

    name: str
    q_forward_input: str
    q_forward_weight: str
    q_backward_input: str
    q_backward_weight: str
    q_backward_outputgrad: str
    q_backward_outputgrad_for_weight: str | None = None
    keep: tuple[str, ...] = ()
    layout: Literal["single_copy", "per_gemm"] = "single_copy"
    hadamard: bool | tuple[str, ...] = False
    gemm: Literal["bf16", "fp8", "fp4"] = "bf16"
    split_input: OperandSplit | None = None
    split_weight: OperandSplit | None = None
    split_grad_output: OperandSplit | None = None
    parameter_split: ParameterSplit | None = None
    keep_first: int | float = 0
    keep_last: int | float = 0
    keep_if_present: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **values: Any) -> Recipe:
        """Check the arguments' names; a dataclass only raises TypeErrors."""
        if args:
            value = shown(args[0])
            raise UserError(f"Recipe takes fields by name, not {value}: did you mean mlb.recipe({value})?")
        for key in values.keys() - cls.__dataclass_fields__:
            raise unknown_name("recipe key", key, cls.__dataclass_fields__)
        if missing := [field for field in ("name", *OPERAND_FIELDS) if field not in values]:
            raise UserError(
                f"recipe block lacks {', '.join(missing)}: add them, or a base ({', '.join(recipes())})"
            )
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Recipe, **{each.name: getattr(self, each.name) for each in fields(self)}), ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"recipe name must be a non-empty string, not {self.name!r}")
        problems = Problems()
        for field in OPERAND_FIELDS:
            value = getattr(self, field)
            with problems.collect():
                _check_quantizer(self.name, field, value)
        problems.raise_any()
        for field in ("keep", "keep_if_present"):
            object.__setattr__(self, field, _checked_patterns(self.name, field, getattr(self, field)))
        object.__setattr__(self, "hadamard", _checked_products(self.name, self.hadamard))
        for field, kind in SPLIT_FIELDS.items():
            object.__setattr__(self, field, settings_from(kind, getattr(self, field), field))
        _check_own_gradient(self)
        _check_choices(self)
        _check_hadamard(self)
        _check_masks(self)
        _check_blocks(self)
        _check_splits(self)
        if self.gemm == "fp8":
            _check_fp8(self)
        if self.gemm == "fp4":
            _check_fp4(self)

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantised."""
        names = [*(getattr(self, field) for field in OPERAND_FIELDS), self.outputgrad_for_weight]
        return not all(quantizer(name).is_identity for name in names)

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether the tensor scale of any operand is rounded to a power of two."""
        names = [*(getattr(self, field) for field in OPERAND_FIELDS), self.outputgrad_for_weight]
        return any(each is not None and each.is_power_of_two for each in map(_encoding, names))

    @property
    def transformed_products(self) -> tuple[str, ...]:
        """The products whose operands are transformed."""
        of_true = ("grad_weight",) if self.hadamard else ()
        return of_true if isinstance(self.hadamard, bool) else self.hadamard

    @property
    def redraws_signs(self) -> bool:
        """Whether the signs of the Hadamard transform change with each micro-batch, as EDEN requires."""
        names = [getattr(self, field) for field in OPERAND_FIELDS]
        return any(each is not None and each.is_eden for each in map(_encoding, names))

    @property
    def outputgrad_for_weight(self) -> str:
        """Quantizer of the output gradient in grad_weight: a separate one, or that of both products."""
        return self.q_backward_outputgrad_for_weight or self.q_backward_outputgrad

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from a configuration block: `{"base": "nvfp4", "keep": ["*.h.0.*"]}`.

        Args:
            values: fields of `Recipe`, and `base`: the named recipe that supplies the fields left out. If
                both have a split, the base also supplies the fields left out within it, as far as its method
                uses them. Without `name`, the result is named after its base and the changed fields.

        Raises:
            UserError: a key is unknown, a value is invalid, or fields are missing and there is no base.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"a recipe block must be a mapping, not {shown(values)}")
        known = ["base", *(field.name for field in fields(Recipe))]
        problems = Problems()
        for key in (each for each in values if each not in known):
            problems.add(unknown_name("recipe key", key, known))
        problems.raise_any()
        changes = {key: value for key, value in values.items() if key != "base"}
        if "base" in values:
            base = recipe(values["base"])
            changes = {key: _over_base(base, key, value) for key, value in changes.items()}
            changed = [key for key in changes if key != "name" and changes[key] != getattr(base, key)]
            name = f"{base.name} with own {', '.join(changed)}" if changed else base.name
            return replace(base, **{"name": name, **changes})
        return Recipe(**{"name": "custom", **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` returns an equal recipe."""
        hadamard = self.hadamard if isinstance(self.hadamard, bool) else list(self.hadamard)
        lists = {"keep": list(self.keep), "keep_if_present": list(self.keep_if_present)}
        return {**asdict(self), **lists, "hadamard": hadamard}

    def __str__(self) -> str:
        forward = f"input {self.q_forward_input}, weight {self.q_forward_weight}"
        backward = f"input {self.q_backward_input}, weight {self.q_backward_weight}, "
        backward += f"grad_output {self.q_backward_outputgrad}"
        if self.outputgrad_for_weight != self.q_backward_outputgrad:
            backward += f", grad_output for weight {self.outputgrad_for_weight}"
        extra = "".join(
            f"; {_described(field, getattr(self, field))}" for field in SPLIT_FIELDS if getattr(self, field)
        )
        extra += "; one copy for each GEMM" if self.layout == "per_gemm" else ""
        products = ", ".join(self.transformed_products)
        extra += f"; Hadamard transform before {products}" if products else ""
        extra += f"; GEMMs in {self.gemm}" if self.gemm != "bf16" else ""
        for end, count in (("first", self.keep_first), ("last", self.keep_last)):
            extra += f"; {end} blocks kept: {count}" if count else ""
        kept = ", ".join((*self.keep, *self.keep_if_present))
        extra += f"; kept: {kept}" if kept else ""
        return f"{self.name} (forward: {forward}; backward: {backward}{extra})"


def operand_quantizers(recipe: Recipe, product: str) -> tuple[str, str]:
    """Names of the quantizers of a product's left and right operand."""
    left, right = (getattr(recipe, field) for field in PRODUCTS[product])
    return left or recipe.q_backward_outputgrad, right  # left is None without a separate one for grad_weight


def _described(field: str, split: OperandSplit | ParameterSplit) -> str:
    """A split in a few words: its rank if it has one, its schedule, and the values that are not defaults."""
    if isinstance(split, ParameterSplit):
        always: tuple[str, ...] = ("rank", "warmup_steps", "merge_steps", "optimizer_state")
    else:
        always = ("rank",) if "rank" in FIELDS_READ[split.method] else ()
    shown = [
        f"{each.name} {getattr(split, each.name)}"
        for each in fields(split)
        if each.name in always or getattr(split, each.name) != each.default
    ]
    return f"{field} ({', '.join(shown)})"


def _over_base(base: Recipe, key: str, value: object) -> object:
    """Convert a configuration's value into a recipe's; the base supplies what a split leaves out."""
    if key in SPLIT_FIELDS:
        below = getattr(base, key)
        if isinstance(value, Mapping) and below is not None:
            value = block_over(below, value)
        return settings_from(SPLIT_FIELDS[key], value, key)
    if key == "hadamard":
        return _checked_products(base.name, value)
    return tuple(value) if isinstance(value, list) else value


class NamedRecipe(NamedTuple):
    """An entry of `recipe.json`.

    Attributes:
        recipe: its fields.
        about: describes it in docs/configuration.md, as Markdown.
        source: title and arXiv number of the paper, or `None`.
        departures: what it does otherwise than the paper, and what it leaves out.
        settings: what the paper sets outside of the recipe: keys of the `"megalowbit"` block.
    """

    recipe: Recipe
    about: str
    source: Mapping[str, str] | None
    departures: tuple[str, ...]
    settings: Mapping[str, Any]


@functools.lru_cache(maxsize=1)
def named_recipes() -> Mapping[str, NamedRecipe]:
    """The named recipes with their descriptions; a `base` is an earlier entry of the file."""
    found: dict[str, NamedRecipe] = {}
    for entry in json.loads(Path(__file__).with_name("recipe.json").read_text(encoding="utf-8")):
        block = {**entry["recipe"], "name": entry["name"]}
        if "base" in block:
            block["base"] = found[block["base"]].recipe
        found[entry["name"]] = NamedRecipe(
            Recipe.from_dict(block),
            entry["about"],
            entry.get("source"),
            tuple(entry.get("departures", ())),
            MappingProxyType(entry.get("with", {})),
        )
    return MappingProxyType(found)


def recipes() -> dict[str, Recipe]:
    """The named recipes of `recipe.json`; docs/configuration.md describes them."""
    return {name: each.recipe for name, each in named_recipes().items()}


def recipe(value: str | Recipe | Mapping[str, Any]) -> Recipe:
    """A recipe from its name or from a configuration block; a `Recipe` is returned unchanged.

    Raises:
        UserError: the name is unknown (the message lists the names and the nearest one), or the block is
            invalid.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    known = recipes()
    if not isinstance(value, str) or value not in known:
        raise unknown_name("recipe", value, known)
    return known[value]


def _check_quantizer(recipe: str, field: str, value: object) -> None:
    """Reject a value that is not a quantizer's name."""
    if not isinstance(value, str):
        raise UserError(f"recipe {recipe!r}: {field} must be a quantizer name, not {shown(value)}")
    try:
        quantizer(value)
    except UserError as error:
        raise UserError(f"recipe {recipe!r}, {field}: {error}") from None


def _check_own_gradient(recipe: Recipe) -> None:
    """Reject an invalid or unusable q_backward_outputgrad_for_weight."""
    value = recipe.q_backward_outputgrad_for_weight
    if value is None:
        return
    _check_quantizer(recipe.name, OWN_GRADIENT, value)
    for field, needed in (("layout", "single_copy"), ("gemm", "bf16")):
        chosen = getattr(recipe, field)
        if chosen != needed:
            raise UserError(
                f'recipe {recipe.name!r}: {OWN_GRADIENT} needs {field} "{needed}", not "{chosen}": '
                f'set it to null, or {field} to "{needed}"'
            )


def _check_choices(recipe: Recipe) -> None:
    """Reject an unknown layout or GEMM."""
    for field, choices in (("layout", LAYOUTS), ("gemm", GEMMS)):
        value = getattr(recipe, field)
        if value not in choices:
            raise UserError(f"recipe {recipe.name!r}: {unknown_name(field, value, choices)}")
    if recipe.gemm != "bf16" and not recipe.quantizes:
        raise UserError(
            f'recipe {recipe.name!r}: gemm "{recipe.gemm}" multiplies quantised operands, but the recipe '
            'quantises nothing: name quantizers, or use gemm "bf16"'
        )


def _encoding(name: str) -> Encoding | None:
    chosen = quantizer(name)
    return chosen.encoding if isinstance(chosen, BlockQuantizer) else None


def _check_hadamard(recipe: Recipe) -> None:
    """Reject a Hadamard transform of operands that other products share, or that have no blocks."""
    products = recipe.transformed_products
    for product in set(PRODUCTS) - set(products):
        for name in operand_quantizers(recipe, product):
            encoding = _encoding(name)
            if encoding is not None and encoding.is_eden:
                raise UserError(
                    f"recipe {recipe.name!r}: {name!r} is unbiased over random transforms only: "
                    f"add {product!r} to hadamard, or choose another quantizer"
                )
    if not products:
        return
    if recipe.layout != "per_gemm":
        raise UserError(
            f"recipe {recipe.name!r}: hadamard transforms the operands of {', '.join(products)} only, which "
            'needs separate copies: set layout to "per_gemm"'
        )
    for product in products:
        for field in PRODUCTS[product]:
            field = "q_backward_outputgrad" if field == OWN_GRADIENT else field
            if _encoding(getattr(recipe, field)) is None:
                raise UserError(
                    f"recipe {recipe.name!r}: hadamard needs a quantizer with blocks for {field}, not "
                    f"{getattr(recipe, field)!r}: choose one, or leave {product} out of hadamard"
                )


def _check_masks(recipe: Recipe) -> None:
    """Reject masks of the gradient of what is split, or of what is no operand of the forward."""
    is_split = any(getattr(recipe, field) is not None for field in SPLIT_FIELDS)
    for field in (*OPERAND_FIELDS, OWN_GRADIENT):
        name = getattr(recipe, field)
        is_forward = name == getattr(recipe, field.replace("backward", "forward"), None)
        encoding = None if name is None or (is_forward and not is_split) else _encoding(name)
        if encoding is not None and encoding.masks_gradient:
            raise UserError(
                f"recipe {recipe.name!r}: {field} is {name!r}, which masks gradients, and only those of "
                "unsplit operands of the forward: name it in q_forward_input and q_forward_weight only"
            )


def _check_fp8(recipe: Recipe) -> None:
    """Reject operands that FP8 cannot represent exactly."""
    for field in OPERAND_FIELDS:
        name = getattr(recipe, field)
        encoding = _encoding(name)
        is_mxfp4 = encoding is not None and encoding.format.is_mxfp4
        if not quantizer(name).is_identity and not is_mxfp4:
            raise UserError(
                f'recipe {recipe.name!r}: gemm "fp8" represents only MXFP4 operands exactly, but {field} is '
                f'{name!r}: use an mxfp4 quantizer, or gemm "bf16"'
            )


def _check_fp4(recipe: Recipe) -> None:
    """Reject operands that FP4 tensor cores cannot multiply."""
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
        if formats[0] is None or not formats[0].is_native or formats[0] != formats[1]:
            raise UserError(
                f'recipe {recipe.name!r}: gemm "fp4" multiplies two NVFP4 (1 × 16) or two MXFP4 operands, '
                f'but {product} has {names[0]!r} and {names[1]!r}: choose such a pair, or gemm "bf16"'
            )


def _checked_patterns(name: str, field: str, value: object) -> tuple[str, ...]:
    """The patterns of a recipe's `keep` or `keep_if_present`, checked."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UserError(f"recipe {name!r}: {field} must be a list of module name patterns, not {value!r}")
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: {field} holds {pattern!r}: expected a module name pattern")
    return patterns


def _checked_products(name: str, value: object) -> bool | tuple[str, ...]:
    """A recipe's `hadamard`, checked; one value for equal choices."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)):
        raise UserError(f"recipe {name!r}: hadamard must be true, false or a list of products, not {value!r}")
    for product in value:
        if product not in PRODUCTS:
            raise UserError(f"recipe {name!r}: {unknown_name('product of hadamard', product, PRODUCTS)}")
    chosen = tuple(product for product in PRODUCTS if product in value)
    return bool(chosen) if chosen in ((), ("grad_weight",)) else chosen


def _check_blocks(recipe: Recipe) -> None:
    """Reject keep_first and keep_last that are neither a count nor a fraction."""
    for field in ("keep_first", "keep_last"):
        value = getattr(recipe, field)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        is_share = isinstance(value, float) and math.isfinite(value) and 0 <= value < 1
        if not is_count and not is_share:
            raise UserError(
                f"recipe {recipe.name!r}: {field} = {shown(value)}: expected a number of blocks, or a "
                "fraction of them between 0 and 1"
            )


def _check_splits(recipe: Recipe) -> None:
    """Reject splits of operands that are not quantised, or that are split twice."""
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
                f"recipe {recipe.name!r}: {field} splits an operand that is not quantised: name a quantizer "
                f"for {' or '.join(names)}, or set {field} to null"
            )
        if field == "split_weight" and split.broadcast_dim is not None:
            raise UserError(f"recipe {recipe.name!r}: split_weight has no slices: set broadcast_dim to null")
    if recipe.parameter_split is not None and recipe.split_weight is not None:
        raise UserError(
            f"recipe {recipe.name!r}: split_weight and parameter_split both split the weight: "
            "set one of them to null"
        )
    if recipe.parameter_split is not None and not recipe.quantizes:
        raise UserError(f"recipe {recipe.name!r}: parameter_split needs quantised layers: name quantizers")
