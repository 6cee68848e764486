"""Recipes: which quantiser each operand of the three GEMMs gets, and which layers stay out.

    output      = input · weightᵀ          q_forward_input,       q_forward_weight
    grad_input  = grad_output · weight     q_backward_outputgrad, q_backward_weight
    grad_weight = grad_outputᵀ · input     q_backward_outputgrad, q_backward_input

Two layouts. `single_copy`: each tensor is quantised once, in blocks along its last axis, and its codes serve
both GEMMs (transposed where need be); a backward quantiser of another name than the forward one quantises the
tensor a second time. `per_gemm`: each GEMM gets operands in blocks along the axis it sums over, as FP4 tensor
cores demand; `hadamard` then transforms both operands of grad_weight along the tokens first.

Quantiser field names are those of the Metis configuration. What a recipe's GEMMs run in is `gemm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from megalowbit.errors import UserError, unknown_name
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

OPERAND_FIELDS = (
    "q_forward_input",
    "q_forward_weight",
    "q_backward_input",
    "q_backward_weight",
    "q_backward_outputgrad",
)
LAYOUTS = ("single_copy", "per_gemm")
GEMMS = ("bf16", "fp8", "fp4")
_NATIVE_FORMATS: tuple[tuple[str, tuple[int, int] | None], ...] = (("e4m3", (1, 16)), ("e8m0", (1, 32)))
PRODUCTS = {
    "output": ("q_forward_input", "q_forward_weight"),
    "grad_input": ("q_backward_outputgrad", "q_backward_weight"),
    "grad_weight": ("q_backward_outputgrad", "q_backward_input"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named choice of quantisers; frozen and comparable.

    Attributes:
        name: for reports.
        q_forward_input: quantiser name, as are the next four.
        q_forward_weight: see above.
        q_backward_input: see above.
        q_backward_weight: see above.
        q_backward_outputgrad: see above.
        keep: patterns (`*`, `?`, `[…]`) of module names left in high precision, with all below them.
        layout: "single_copy" or "per_gemm", see above.
        hadamard: random Hadamard transform of grad_weight's operands; with "per_gemm" only.
        gemm: "bf16"; "fp8" multiplies MXFP4 operands in FP8 where that is exact; "fp4" on FP4 tensor cores.

    Raises:
        UserError: a quantiser is unknown, `keep` is not a list of strings, or the fields do not fit together.
    """

    name: str
    q_forward_input: str
    q_forward_weight: str
    q_backward_input: str
    q_backward_weight: str
    q_backward_outputgrad: str
    keep: tuple[str, ...] = ()
    layout: Literal["single_copy", "per_gemm"] = "single_copy"
    hadamard: bool = False
    gemm: Literal["bf16", "fp8", "fp4"] = "bf16"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"recipe name must be a non-empty string, not {self.name!r}")
        for field in OPERAND_FIELDS:
            value = getattr(self, field)
            if not isinstance(value, str):
                raise UserError(f"recipe {self.name!r}: {field} must be a quantizer name, not {value!r}")
            quantizer(value)
        object.__setattr__(self, "keep", _patterns(self.name, self.keep))
        _check_choices(self)
        _check_hadamard(self)
        if self.gemm == "fp8":
            _check_fp8(self)
        if self.gemm == "fp4":
            _check_fp4(self)

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantised at all."""
        return not all(quantizer(getattr(self, field)).is_identity for field in OPERAND_FIELDS)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from a configuration block: `{"base": "nvfp4", "keep": ["*.h.0.*"]}`.

        Args:
            values: fields of `Recipe`, and `base`, the named recipe that fills those left out. Without a
                name of its own the result is called after its base, with what was changed.

        Raises:
            UserError: a key is unknown, a value is wrong, or fields are missing and there is no base.
        """
        known = [field.name for field in fields(Recipe)]
        for key in values:
            if key not in known and key != "base":
                raise unknown_name("recipe key", key, ["base", *known])
        changes = {key: value for key, value in values.items() if key != "base"}
        if "base" in values:
            base = recipe(values["base"])
            changed = [key for key in changes if key != "name" and _plain(changes[key]) != getattr(base, key)]
            name = f"{base.name} with own {', '.join(changed)}" if changed else base.name
            return replace(base, **{"name": name, **changes})
        missing = [field for field in OPERAND_FIELDS if field not in changes]
        if missing:
            raise UserError(
                f"recipe block lacks {', '.join(missing)}: give them, or a base ({', '.join(recipes())})"
            )
        return Recipe(**{"name": "custom", **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` gives back an equal recipe."""
        return {**asdict(self), "keep": list(self.keep)}

    def __str__(self) -> str:
        forward = f"input {self.q_forward_input}, weight {self.q_forward_weight}"
        backward = (
            f"input {self.q_backward_input}, weight {self.q_backward_weight}, "
            f"grad_output {self.q_backward_outputgrad}"
        )
        extra = "; one copy for each GEMM" if self.layout == "per_gemm" else ""
        extra += "; Hadamard transform before grad_weight" if self.hadamard else ""
        extra += f"; GEMMs in {self.gemm}" if self.gemm != "bf16" else ""
        extra += f"; kept: {', '.join(self.keep)}" if self.keep else ""
        return f"{self.name} (forward: {forward}; backward: {backward}{extra})"


def _check_choices(recipe: Recipe) -> None:
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


def _check_hadamard(recipe: Recipe) -> None:
    if not recipe.hadamard:
        return
    if recipe.layout != "per_gemm":
        raise UserError(
            f"recipe {recipe.name!r}: hadamard transforms operands of grad_weight alone, which needs copies "
            'of their own: set layout to "per_gemm"'
        )
    for field in PRODUCTS["grad_weight"]:
        if _encoding(getattr(recipe, field)) is None:
            raise UserError(
                f"recipe {recipe.name!r}: hadamard needs a quantizer with blocks for {field}, not "
                f"{getattr(recipe, field)!r}: choose one, or set hadamard to false"
            )


def _check_fp8(recipe: Recipe) -> None:
    for field in OPERAND_FIELDS:
        name = getattr(recipe, field)
        encoding = _encoding(name)
        is_mxfp4 = encoding is not None and encoding.format.scale == "e8m0"
        if not quantizer(name).is_identity and not is_mxfp4:
            raise UserError(
                f'recipe {recipe.name!r}: gemm "fp8" holds only MXFP4 operands exactly, but {field} is '
                f'{name!r}: use an mxfp4 quantizer, or gemm "bf16"'
            )


def _check_fp4(recipe: Recipe) -> None:
    if recipe.layout != "per_gemm":
        raise UserError(
            f'recipe {recipe.name!r}: gemm "fp4" needs blocks along the axis summed over: '
            'set layout to "per_gemm"'
        )
    for product, operands in PRODUCTS.items():
        names = [getattr(recipe, field) for field in operands]
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


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _patterns(name: str, keep: object) -> tuple[str, ...]:
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise UserError(f"recipe {name!r}: keep must be a list of module name patterns, not {keep!r}")
    patterns = tuple(keep)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: keep holds {pattern!r}: expected a module name pattern")
    return patterns


def _uniform(name: str, operand: str, *, outputgrad: str | None = None) -> Recipe:
    return Recipe(
        name=name,
        q_forward_input=operand,
        q_forward_weight=operand,
        q_backward_input=operand,
        q_backward_weight=operand,
        q_backward_outputgrad=outputgrad or operand,
    )


def recipes() -> dict[str, Recipe]:
    """The named recipes.

    `nvfp4` and `mxfp4` round to nearest even and output gradients stochastically; `bf16` quantises nothing.
    """
    named = [
        _uniform("nvfp4", "nvfp4e2m1bnosr", outputgrad="nvfp4e2m1b"),
        _uniform("mxfp4", "mxfp4e2m1bnosr", outputgrad="mxfp4e2m1b"),
        _uniform("bf16", "fp32"),
    ]
    return {each.name: each for each in named}


def recipe(value: str | Recipe | Mapping[str, Any]) -> Recipe:
    """A recipe from its name, from a configuration block (`Recipe.from_dict`), or as it is.

    Raises:
        UserError: the name is unknown (the message lists the names and the nearest one), or the block is not
            valid.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    known = recipes()
    if not isinstance(value, str) or value not in known:
        raise unknown_name("recipe", value, known)
    return known[value]
