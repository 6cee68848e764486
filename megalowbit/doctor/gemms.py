"""The number format in which each product is multiplied on the target, and what is emulated.

A recipe says how operands are rounded. Whether the hardware multiplies them in that format is another
question, which `layers/matmul` decides for each product:

    gemm    multiplied in   if
    bf16    bf16, or wider  always: each product of two FP4 numbers is exact in bf16, and sums are fp32
    fp8     FP8             both operands are MXFP4 and all sizes are multiples of 16. The device also checks
                            the range of the exponents, product by product, and multiplies in bf16 otherwise
    fp4     FP4             both operands are NVFP4, or both MXFP4, the result's columns are a multiple of 16,
                            and the device is a Blackwell; otherwise bf16

The rules are asked of the functions that the layers ask. Not covered: precisions that speculation chooses
during the run, ranges of exponents, and shapes that differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megalowbit.doctor.notices import Notice, note, problem, warning
from megalowbit.doctor.plan import Projection, RunPlan
from megalowbit.doctor.target import BF16, FP4, FP8, Target
from megalowbit.layers.cpu_gemm import cpu_gemm
from megalowbit.layers.layer_recipe import OPERAND_FIELDS, PRODUCTS, operand_quantizers
from megalowbit.layers.matmul.fp4 import SIZE_MULTIPLE
from megalowbit.layers.matmul.fp8 import may_fit
from megalowbit.layers.matmul.gemms import gemm_dtype
from megalowbit.layers.matmul.operand import exact_dtype
from megalowbit.layers.matmul.quantizations import scale_format
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class ProductFormat(NamedTuple):
    """How one product of a projection runs.

    Attributes:
        projection: its name, with `*` for the block.
        product: `output`, `grad_input` or `grad_weight`.
        unit: the format that is multiplied: `bf16`, `fp16`, `fp32`, `fp8` or `fp4`.
        operands: the quantizers of both operands; empty: not quantised.
        is_emulated: whether operands are rounded to a format that the product does not run in.
        reason: why it does not run as the recipe's `gemm` says; else empty.
    """

    projection: str
    product: str
    unit: str
    operands: tuple[str, ...] = ()
    is_emulated: bool = False
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.unit} (emulates {_short(self.operands)})" if self.is_emulated else self.unit


def _short(operands: Iterable[str]) -> str:
    """Quantizers without their options: `nvfp4e2m1bnosr` → `nvfp4`."""
    names = dict.fromkeys(
        name.partition(":")[0].partition("e2m1")[0] for name in operands if not quantizer(name).is_identity
    )
    return " × ".join(names)


def product_formats(plan: RunPlan, target: Target, recipe: Recipe) -> list[ProductFormat]:
    """The format of each product of each projection, with the recipe of one phase of the run."""
    return [
        product_format(projection, product, recipe, plan, target)
        for projection in plan.projections
        for product in PRODUCTS
    ]


def product_format(
    projection: Projection, product: str, recipe: Recipe, plan: RunPlan, target: Target
) -> ProductFormat:
    """The format of one product."""
    if not projection.is_lowbit:
        is_choice = target.is_cpu and plan.precision == "bf16"
        return ProductFormat(projection.name, product, cpu_gemm() if is_choice else plan.precision)
    recipe = recipe.of_layer(projection.layer)
    operands = operand_quantizers(recipe, product)
    is_quantized = any(not quantizer(name).is_identity for name in operands)
    unit: str = recipe.gemm
    reason = ""
    sizes = (plan.micro_tokens, projection.in_features, projection.out_features)
    if unit == "fp8":
        reason = _why_not_fp8(operands, sizes, target)
    elif unit == "fp4":
        columns = projection.out_features if product == "output" else projection.in_features
        reason = _why_not_fp4(operands, columns, target)
    if unit == "bf16" or reason:
        unit = NAMES[_wide_dtype(operands, plan.precision, target)]
    return ProductFormat(
        projection.name,
        product,
        unit,
        operands if is_quantized else (),
        is_emulated=is_quantized and not unit.startswith("fp4"),
        reason=reason,
    )


def _wide_dtype(operands: tuple[str, str], precision: str, target: Target) -> torch.dtype:
    exact = [exact_dtype(name) for name in operands]
    dtype = DTYPES[precision]
    if target.is_amd and dtype != torch.bfloat16:  # no products of half precision with a wide result
        return torch.float32
    return gemm_dtype(exact, dtype, torch.device("cpu" if target.is_cpu else "cuda"))


def _why_not_fp8(operands: tuple[str, str], sizes: tuple[int, ...], target: Target) -> str:
    if target.capability is not None and target.capability < FP8:
        return f"{target.name} has no FP8 units"
    if all(quantizer(name).is_identity for name in operands):
        return "not quantised"
    if may_fit([scale_format(name) for name in operands], sizes):
        return ""
    return f"sizes {' × '.join(map(str, sizes))} are not all multiples of 16, or an operand is not MXFP4"


def _why_not_fp4(operands: tuple[str, str], columns: int, target: Target) -> str:
    if target.capability is None or target.capability < FP4:
        return f"{target.name} has no FP4 units"
    if all(quantizer(name).is_identity for name in operands):
        return "not quantised"
    if columns % SIZE_MULTIPLE:
        return f"{columns} columns are not a multiple of {SIZE_MULTIPLE}"
    return ""


def check_formats(plan: RunPlan, target: Target) -> list[Notice]:
    """Products that cannot run on the target, run otherwise than the recipe says, or could run faster."""
    recipe, found = plan.recipe, []
    key = "megalowbit.recipe.gemm"
    gemms = {each.gemm for each in recipe.variants}
    if "fp4" in gemms and "fp4" not in target.units:
        found.append(_not_there("FP4", "10.0 (Blackwell)", plan, target))
    elif "fp8" in gemms and target.capability is not None and target.capability < FP8:
        found.append(_not_there("FP8", "8.9 (Ada, Hopper)", plan, target))
    if plan.precision == "bf16" and target.capability is not None and target.capability < BF16:
        found.append(
            problem(
                "gemm-units",
                f"precision bf16 on {target.name}, whose compute capability is below 8.0: it has no bf16 "
                "units",
                "--set megalowbit.precision=fp16",
            )
        )
    formats = product_formats(plan, target, recipe)
    found += _falls_back(recipe, formats)
    if recipe.quantizes and gemms == {"bf16"} and "fp4" in target.units:
        found.append(
            note(
                "gemm-emulated",
                f"{target.name} has FP4 units, and recipe {recipe.name!r} does not use them: its products "
                f"run in {_units(formats)} with numbers of {_emulated(formats)}, no faster than without "
                "rounding",
                f'{key}: "fp4" with layout "per_gemm" uses them; not tested on hardware (docs/gpu.md)',
            )
        )
    elif recipe.quantizes and all(each.unit != "fp4" for each in formats) and not found:
        found.append(
            note(
                "gemm-emulated",
                f"{_emulated(formats)} is emulated on {target.name}: products run in {_units(formats)}, so "
                "expect the numerics of low-bit training, not its speed",
            )
        )
    found += _without_kernels(recipe, target)
    found += _slow_on_cpu(plan, target, formats)
    return found


def _not_there(unit: str, needed: str, plan: RunPlan, target: Target) -> Notice:
    return problem(
        "gemm-units",
        f'recipe {plan.recipe.name!r} has gemm "{unit.lower()}", which needs compute capability '
        f"{needed}: "
        f"{target.name} has no {unit} units, and the run would refuse to start",
        'set gemm to "bf16" in the recipe, which computes the same products',
    )


def _falls_back(recipe: Recipe, formats: list[ProductFormat]) -> list[Notice]:
    slow = [each for each in formats if each.reason and each.operands]
    if not slow or len(slow) == len([each for each in formats if each.operands]):
        return []
    first, gemms = slow[0], sorted({each.gemm for each in recipe.variants} - {"bf16"})
    return [
        warning(
            "gemm-falls-back",
            f"{len(slow)} of {len(formats)} kinds of products run in bf16 instead of {' or '.join(gemms)}, "
            f"such as {first.product} of {first.projection}: {first.reason}",
            "change the sizes as below",
        )
    ]


def _units(formats: list[ProductFormat]) -> str:
    return " and ".join(dict.fromkeys(each.unit for each in formats if each.operands))


def _emulated(formats: list[ProductFormat]) -> str:
    return " and ".join(dict.fromkeys(_short(each.operands) for each in formats if each.operands))


def _without_kernels(recipe: Recipe, target: Target) -> list[Notice]:
    names = dict.fromkeys(getattr(each, field) for each in recipe.variants for field in OPERAND_FIELDS)
    slow = [name for name in names if not quantizer(name).is_identity and not has_kernel(name)]
    if not slow or target.is_cpu:
        return []
    return [
        warning(
            "recipe-without-kernels",
            f"recipe {recipe.name!r} has quantizers without Triton kernels ({', '.join(slow)}): plain torch "
            "rounds their operands, several times slower, and no time below includes that",
            "megalowbit recipes lists others",
        )
    ]


def _slow_on_cpu(plan: RunPlan, target: Target, formats: list[ProductFormat]) -> list[Notice]:
    """Products in half precision on CPUs that emulate it, unless the run multiplies in fp32."""
    slow = [each for each in formats if each.unit == plan.precision != "fp32"]
    if not target.is_cpu or not slow or _has_instructions(plan.precision):
        return []
    return [
        note(
            "gemm-slow",
            f"oneDNN does not multiply in {plan.precision} on this CPU: products in {plan.precision}, such "
            f"as those of {slow[0].projection}, take several times as long as in fp32",
            "--set megalowbit.precision=fp32",
        )
    ]


def _has_instructions(precision: str) -> bool:
    """Whether oneDNN multiplies in this half precision on the CPUs of this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")())


def has_kernel(name: str) -> bool:
    """Whether a Triton kernel rounds this quantizer's operands."""
    from megalowbit.quantize.triton import launch_fp4, launch_fp32_scales

    chosen = quantizer(name)
    if not isinstance(chosen, BlockQuantizer) or not chosen.encoding.has_kernels:
        return False
    modules = (launch_fp4, launch_fp32_scales)
    return any(each.covers(chosen.encoding.format, torch.bfloat16) for each in modules)


def to_dicts(formats: Iterable[ProductFormat]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**each._asdict(), "operands": list(each.operands)} for each in formats]
