"""The recipe of a layer: the quantizer of each operand of its three products.

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

from dataclasses import dataclass, fields
from typing import Literal

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.spectral.settings import FIELDS_READ, OperandSplit, ParameterSplit, settings_from

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
class LayerRecipe:
    """The quantizer of each operand of a layer, and how its products run; frozen and comparable.

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

    Raises:
        UserError: a quantizer is unknown, or fields cannot be combined.
    """

    name: str
    q_forward_input: str
    q_forward_weight: str
    q_backward_input: str
    q_backward_weight: str
    q_backward_outputgrad: str
    q_backward_outputgrad_for_weight: str | None = None
    layout: Literal["single_copy", "per_gemm"] = "single_copy"
    hadamard: bool | tuple[str, ...] = False
    gemm: Literal["bf16", "fp8", "fp4"] = "bf16"
    split_input: OperandSplit | None = None
    split_weight: OperandSplit | None = None
    split_grad_output: OperandSplit | None = None
    parameter_split: ParameterSplit | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"recipe name must be a non-empty string, not {self.name!r}")
        problems = Problems()
        for field in OPERAND_FIELDS:
            value = getattr(self, field)
            with problems.collect():
                _check_quantizer(self.name, field, value)
        problems.raise_any()
        object.__setattr__(self, "hadamard", checked_products(self.name, self.hadamard))
        for field, kind in SPLIT_FIELDS.items():
            object.__setattr__(self, field, settings_from(kind, getattr(self, field), field))
        _check_own_gradient(self)
        _check_choices(self)
        _check_hadamard(self)
        _check_masks(self)
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

    def description(self) -> str:
        """All that differs from a layer without quantisation, in a few words."""
        forward = f"input {self.q_forward_input}, weight {self.q_forward_weight}"
        backward = f"input {self.q_backward_input}, weight {self.q_backward_weight}, "
        backward += f"grad_output {self.q_backward_outputgrad}"
        if self.outputgrad_for_weight != self.q_backward_outputgrad:
            backward += f", grad_output for weight {self.outputgrad_for_weight}"
        extra = "".join(
            f"; {split_described(field, getattr(self, field))}"
            for field in SPLIT_FIELDS
            if getattr(self, field)
        )
        extra += "; one copy for each GEMM" if self.layout == "per_gemm" else ""
        products = ", ".join(self.transformed_products)
        extra += f"; Hadamard transform before {products}" if products else ""
        extra += f"; GEMMs in {self.gemm}" if self.gemm != "bf16" else ""
        return f"forward: {forward}; backward: {backward}{extra}"


def operand_quantizers(recipe: LayerRecipe, product: str) -> tuple[str, str]:
    """Names of the quantizers of a product's left and right operand."""
    left, right = (getattr(recipe, field) for field in PRODUCTS[product])
    return left or recipe.q_backward_outputgrad, right  # left is None without a separate one for grad_weight


def checked_products(name: str, value: object) -> bool | tuple[str, ...]:
    """A recipe's `hadamard`, checked; one value for equal choices."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)):
        raise UserError(f"recipe {name!r}: hadamard must be true, false or a list of products, not {value!r}")
    for product in value:
        if not isinstance(product, str) or product not in PRODUCTS:
            raise UserError(f"recipe {name!r}: {unknown_name('product of hadamard', product, PRODUCTS)}")
    chosen = tuple(product for product in PRODUCTS if product in value)
    return bool(chosen) if chosen in ((), ("grad_weight",)) else chosen


def split_described(field: str, split: OperandSplit | ParameterSplit) -> str:
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


def _check_quantizer(recipe: str, field: str, value: object) -> None:
    """Reject a value that is not a quantizer's name."""
    if not isinstance(value, str):
        raise UserError(f"recipe {recipe!r}: {field} must be a quantizer name, not {shown(value)}")
    try:
        quantizer(value)
    except UserError as error:
        raise UserError(f"recipe {recipe!r}, {field}: {error}") from None


def _check_own_gradient(recipe: LayerRecipe) -> None:
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


def _check_choices(recipe: LayerRecipe) -> None:
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


def _check_hadamard(recipe: LayerRecipe) -> None:
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


def _check_masks(recipe: LayerRecipe) -> None:
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


def _check_fp8(recipe: LayerRecipe) -> None:
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


def _check_fp4(recipe: LayerRecipe) -> None:
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


def _check_splits(recipe: LayerRecipe) -> None:
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
