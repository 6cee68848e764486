"""Recipes: the quantizer of each operand of the three products, and the layers left in high precision.

    output      = input · weightᵀ          q_forward_input,       q_forward_weight
    grad_input  = grad_output · weight     q_backward_outputgrad, q_backward_weight
    grad_weight = grad_outputᵀ · input     q_backward_outputgrad, q_backward_input

There are two layouts. `single_copy`: each tensor is quantised once, in blocks along its last axis, and both
products use its codes (transposed if necessary). If the backward quantizer has another name than the forward
one, the tensor is quantised a second time. `per_gemm`: each product gets operands in blocks along the axis it
sums over, as FP4 tensor cores require; `hadamard` then first transforms both operands of grad_weight along
the tokens.

An operand may be split before it is quantised: into a low-rank part, whose factors are quantised, and a
residual, which the operand's quantizer rounds. The names of the quantizer fields are those of the Metis
configuration. `q_backward_outputgrad_for_weight` is an addition: it gives grad_weight a second quantised
output gradient, in the layout `single_copy` too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

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
    "q_forward_input",
    "q_forward_weight",
    "q_backward_input",
    "q_backward_weight",
    "q_backward_outputgrad",
)
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
        hadamard: random Hadamard transform of both operands of `grad_weight`; with `per_gemm` only.
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
    hadamard: bool = False
    gemm: Literal["bf16", "fp8", "fp4"] = "bf16"
    split_input: OperandSplit | None = None
    split_weight: OperandSplit | None = None
    split_grad_output: OperandSplit | None = None
    parameter_split: ParameterSplit | None = None
    keep_first: int | float = 0
    keep_last: int | float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"recipe name must be a non-empty string, not {self.name!r}")
        problems = Problems()
        for field in OPERAND_FIELDS:
            value = getattr(self, field)
            with problems.collect():
                _check_quantizer(self.name, field, value)
        problems.raise_any()
        object.__setattr__(self, "keep", _checked_patterns(self.name, self.keep))
        for field, kind in SPLIT_FIELDS.items():
            object.__setattr__(self, field, settings_from(kind, getattr(self, field), field))
        _check_own_gradient(self)
        _check_choices(self)
        _check_hadamard(self)
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
        known = [field.name for field in fields(Recipe)]
        problems = Problems()
        for key in values:
            if key not in known and key != "base":
                problems.add(unknown_name("recipe key", key, ["base", *known]))
        problems.raise_any()
        changes = {key: value for key, value in values.items() if key != "base"}
        if "base" in values:
            base = recipe(values["base"])
            changes = {key: _over_base(base, key, value) for key, value in changes.items()}
            changed = [key for key in changes if key != "name" and changes[key] != getattr(base, key)]
            name = f"{base.name} with own {', '.join(changed)}" if changed else base.name
            return replace(base, **{"name": name, **changes})
        missing = [field for field in OPERAND_FIELDS if field not in changes]
        if missing:
            raise UserError(
                f"recipe block lacks {', '.join(missing)}: add them, or a base ({', '.join(recipes())})"
            )
        return Recipe(**{"name": "custom", **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` returns an equal recipe."""
        return {**asdict(self), "keep": list(self.keep)}

    def __str__(self) -> str:
        forward = f"input {self.q_forward_input}, weight {self.q_forward_weight}"
        backward = (
            f"input {self.q_backward_input}, weight {self.q_backward_weight}, "
            f"grad_output {self.q_backward_outputgrad}"
        )
        if self.outputgrad_for_weight != self.q_backward_outputgrad:
            backward += f", grad_output for weight {self.outputgrad_for_weight}"
        extra = "".join(
            f"; {_described(field, getattr(self, field))}" for field in SPLIT_FIELDS if getattr(self, field)
        )
        extra += "; one copy for each GEMM" if self.layout == "per_gemm" else ""
        extra += "; Hadamard transform before grad_weight" if self.hadamard else ""
        extra += f"; GEMMs in {self.gemm}" if self.gemm != "bf16" else ""
        extra += f"; first blocks kept: {self.keep_first}" if self.keep_first else ""
        extra += f"; last blocks kept: {self.keep_last}" if self.keep_last else ""
        extra += f"; kept: {', '.join(self.keep)}" if self.keep else ""
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
    return tuple(value) if isinstance(value, list) else value


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

    | name               |                                                                                |
    |--------------------|--------------------------------------------------------------------------------|
    | `nvfp4`            | NVFP4, nearest even; output gradients stochastic                               |
    | `mxfp4`            | the same in MXFP4                                                              |
    | `nvidia-nvfp4`     | one copy for each product, 16 × 16 weight tiles, Hadamard, last blocks in bf16 |
    |                    | (NVIDIA, "Pretraining LLMs with NVFP4", arXiv:2509.25149)                      |
    | `metis-nvfp4`      | `nvfp4`, with the mean over tokens split off from inputs: the best and the     |
    |                    | cheapest of all splits in docs/experiments.md                                  |
    | `metis-seed`       | the settings of the GPT-2 script of the Metis repository, with its arithmetic  |
    | `fp8`              | E4M3, output gradients E5M2, one scale a tensor                                |
    | `speculative-int8` | blocks of 128 in INT8, or E5M2 if they have outliers; output gradients         |
    |                    | stochastic                                                                     |
    | `bf16`             | quantises nothing                                                              |
    """
    nvfp4 = _uniform("nvfp4", "nvfp4e2m1bnosr", outputgrad="nvfp4e2m1b")
    seed_quantizer = "fp4e2m1b:seed_compat"
    tiles = "nvfp4e2m1bnosr:tile16"
    named = [
        nvfp4,
        _uniform("mxfp4", "mxfp4e2m1bnosr", outputgrad="mxfp4e2m1b"),
        replace(
            nvfp4,
            name="nvidia-nvfp4",
            q_forward_weight=tiles,
            q_backward_weight=tiles,
            layout="per_gemm",
            hadamard=True,
            keep_last=0.15,
        ),
        replace(nvfp4, name="metis-nvfp4", split_input=OperandSplit(method="mean")),
        replace(
            _uniform("metis-seed", seed_quantizer),
            split_grad_output=OperandSplit(
                method="svd_lowrank", rank=60, niter=0, order="seed", q_factors=seed_quantizer
            ),
        ),
        _uniform("fp8", "fp8e4m3", outputgrad="fp8e5m2"),
        _uniform("speculative-int8", "int8e5m2b", outputgrad="int8e5m2b:sr"),
        _uniform("bf16", "fp32"),
    ]
    return {each.name: each for each in named}


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
    if not isinstance(value, str):
        raise UserError(
            f"recipe {recipe.name!r}: {OWN_GRADIENT} must be a quantizer name or null, not {value!r}"
        )
    quantizer(value)
    for field, needed in (("layout", "single_copy"), ("gemm", "bf16")):
        chosen = getattr(recipe, field)
        if chosen != needed:
            raise UserError(
                f'recipe {recipe.name!r}: {OWN_GRADIENT} needs {field} "{needed}", not "{chosen}": '
                f'set it to null, or {field} to "{needed}"'
            )


def _check_choices(recipe: Recipe) -> None:
    """Reject an unknown layout or GEMM, and flags that are not booleans."""
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
    """Reject a Hadamard transform of operands that other products share, or that have no blocks."""
    if not recipe.hadamard:
        return
    if recipe.layout != "per_gemm":
        raise UserError(
            f"recipe {recipe.name!r}: hadamard transforms the operands of grad_weight only, which needs "
            'separate copies: set layout to "per_gemm"'
        )
    for field in ("q_backward_outputgrad", "q_backward_input"):
        if _encoding(getattr(recipe, field)) is None:
            raise UserError(
                f"recipe {recipe.name!r}: hadamard needs a quantizer with blocks for {field}, not "
                f"{getattr(recipe, field)!r}: choose one, or set hadamard to false"
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


def _checked_patterns(name: str, keep: object) -> tuple[str, ...]:
    """The patterns of a recipe's `keep`, checked."""
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise UserError(f"recipe {name!r}: keep must be a list of module name patterns, not {keep!r}")
    patterns = tuple(keep)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: keep holds {pattern!r}: expected a module name pattern")
    return patterns


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
