"""Names of quantizers: `base`, or `base:option:option`; docs/formats.md describes them.

| base                                            | elements and scales                        | rounding   |
|-------------------------------------------------|--------------------------------------------|------------|
| `fp4e2m1`                                       | E2M1, one fp32 scale                       | nearest    |
| `fp4e2m1b`, `nvfp4e2m1b`, `mxfp4e2m1b`          | E2M1, blocks of 1 × 16, 1 × 16, 1 × 32     | stochastic |
| these three with `nosr`                         | the same                                   | nearest    |
| `mxfp8e4m3b`, `mxfp8e5m2b`                      | E4M3 or E5M2, blocks of 1 × 32, E8M0       | nearest    |
| `fp6e3m2`, `fp8e4m3`, `fp8e5m2`, `int8`, `int4` | one fp32 scale; with `b` blocks of 1 × 16  | nearest    |
| `ue5m3fp4e2m1b`, `hif4`, both also with `nosr`  | E2M1, 1 × 16, UE5M3; S1P2, 1 × 64, HiF4    | stochastic |
| `int8e5m2b`                                     | blocks of 1 × 128, INT8 or E5M2, fp32      | nearest    |
| `1p58bit`                                       | -1, 0, 1 times the mean magnitude (BitNet) | nearest    |
| `fp32`                                          | not quantised                              |            |

`nvfp4…` has a power of two for tensor scale, unless `fp32_scale` is given.

The bases and `nosr` are those of Metis, with its default rounding. The `OPTIONS` are additions.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.formats.block_format import HIF4, MIXED_INT8, MXFP4, NVFP4, UE5M3_FP4, BlockFormat, ScaleKind
from megalowbit.formats.block_scale import ScaleRounding
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8, TERNARY, ElementFormat
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.quantizer import BlockQuantizer, IdentityQuantizer, Quantizer
from megalowbit.quantize.seed_compat import SEED_COMPAT

# Options that set the block: its size, and the kinds of scale that support it.
BLOCKS: dict[str, tuple[tuple[int, int], tuple[ScaleKind, ...]]] = {
    "tile16": ((16, 16), ("e4m3", "ue5m3", "fp32")),
    "tile128": ((128, 128), ("fp32",)),
    "block32": ((1, 32), ("fp32", "signed_fp32")),
    "block128": ((1, 128), ("fp32", "signed_fp32")),
}
OPTIONS = (
    *(
        "sr",
        "unbiased",
        "eden",
        "quest",
        *BLOCKS,
        "floor",
        "4over6",
        "4over6_448",
        "fp32_scale",
        "token_scale",
        "q_scalar",
    ),
    "seed_compat",
)
NEAREST = "nosr"  # suffix of bases that round to nearest
UNQUANTISED = ("bf16", "fp16", "fp64", "bfloat16", "float16", "float32", "float64", "none")
CONTRADICTIONS = (("unbiased", "floor"), *itertools.combinations(BLOCKS, 2))
CONTRADICTIONS += (("4over6", "4over6_448"), ("token_scale", "fp32_scale"), ("token_scale", "tile16"))
CONTRADICTIONS += (("unbiased", "eden"), ("4over6", "eden"), ("4over6_448", "eden"))
CONTRADICTIONS += (("quest", "unbiased"), ("quest", "floor"))


@functools.lru_cache(maxsize=1)
def _bases() -> dict[str, Encoding | None]:
    nvfp4 = Encoding(format=NVFP4, is_power_of_two=True)
    mxfp4 = Encoding(format=MXFP4, scale_rounding="up")
    fp4_block = _fp32_scaled(E2M1, (1, 16))
    bases: dict[str, Encoding | None] = {
        "nvfp4e2m1b": replace(nvfp4, is_stochastic=True),
        "nvfp4e2m1bnosr": nvfp4,
        "mxfp4e2m1b": replace(mxfp4, is_stochastic=True),
        "mxfp4e2m1bnosr": mxfp4,
        "mxfp8e4m3b": replace(mxfp4, format=replace(MXFP4, element=E4M3)),
        "mxfp8e5m2b": replace(mxfp4, format=replace(MXFP4, element=E5M2)),
        "ue5m3fp4e2m1b": Encoding(format=UE5M3_FP4, is_stochastic=True),
        "ue5m3fp4e2m1bnosr": Encoding(format=UE5M3_FP4),
        "hif4": Encoding(format=HIF4, is_stochastic=True),
        "hif4nosr": Encoding(format=HIF4),
        "fp4e2m1": _fp32_scaled(E2M1, None),
        "fp4e2m1b": replace(fp4_block, is_stochastic=True),
        "fp4e2m1bnosr": fp4_block,
    }
    for name, element in (
        ("fp6e3m2", E3M2),
        ("fp8e4m3", E4M3),
        ("fp8e5m2", E5M2),
        ("int8", INT8),
        ("int4", INT4),
    ):
        bases[name] = _fp32_scaled(element, None)
        bases[name + "b"] = _fp32_scaled(element, (1, 16))
    bases["int8e5m2b"] = Encoding(format=MIXED_INT8)
    bases["1p58bit"] = replace(_fp32_scaled(TERNARY, None), scale_from="mean")
    bases["fp32"] = None
    return bases


def _fp32_scaled(element: ElementFormat, block: tuple[int, int] | None) -> Encoding:
    return Encoding(format=BlockFormat(element=element, block=block, scale="fp32"))


def quantizer_names() -> tuple[str, ...]:
    """All base names that `quantizer` accepts."""
    return tuple(_bases())


def quantizer(name: str) -> Quantizer:
    """The quantizer with this name.

    Raises:
        UserError: the base or an option is unknown, or the base does not support the option.
    """
    if not isinstance(name, str):
        raise UserError(f"a quantizer has a name, not {shown(name)}: known: {', '.join(quantizer_names())}")
    return _quantizer(name)


@functools.lru_cache(maxsize=256)
def _quantizer(name: str) -> Quantizer:
    base, *options = name.split(":")
    if base not in _bases():
        raise _unknown_base(base)
    try:
        _check_options(base, options)
        if "seed_compat" in options:
            return _seed_compat(name, base, options)
        encoding = _bases()[base]
        if encoding is None:
            if options:
                raise UserError(f"{base} takes no options")
            return IdentityQuantizer(name=name)
        for option in options:
            encoding = _with_option(encoding, option)
        if "unbiased" in options:
            _check_unbiased(encoding)
    except UserError as error:
        raise UserError(f"quantizer {name!r}: {error}") from error
    return BlockQuantizer(name=name, encoding=encoding)


def _unknown_base(base: str) -> UserError:
    if base.lower() in _bases():
        return UserError(f"unknown quantizer {base!r}: names are in lower case, write {base.lower()!r}")
    if base.lower() in UNQUANTISED:
        return UserError(f"unknown quantizer {base!r}: write 'fp32' for not quantised, whatever the dtype")
    return unknown_name("quantizer", base, quantizer_names())


def _check_options(base: str, options: list[str]) -> None:
    keys = [option.partition("=")[0] for option in options]
    for option, key in zip(options, keys, strict=True):
        if not option:
            raise UserError("an option is empty, leave out its colon")
        if key not in OPTIONS and key.lower() in OPTIONS:
            raise UserError(f"options are in lower case, write {option.lower()!r}")
        if key not in OPTIONS:
            raise unknown_name("option", option, OPTIONS)
        if base.endswith(NEAREST) and key in ("sr", "unbiased", "eden"):
            remedy = base.removesuffix(NEAREST) + ("" if key == "sr" else f":{key}")
            raise UserError(f"{NEAREST} and {key} contradict each other, use {remedy}")
        if ("=" in option) != (key == "q_scalar"):
            raise UserError("write q_scalar=NUMBER, and the other options without a value")
        if keys.count(key) > 1:
            raise UserError(f"{key} is given twice, write it once")
    for one, other in CONTRADICTIONS:
        if one in keys and other in keys:
            raise UserError(f"{one} and {other} contradict each other, leave one out")


def _seed_compat(name: str, base: str, options: list[str]) -> Quantizer:
    if len(options) > 1:
        raise UserError("seed_compat cannot be combined with other options, leave those out")
    if base not in SEED_COMPAT:
        raise UserError(f"seed_compat exists for {', '.join(SEED_COMPAT)}")
    return SEED_COMPAT[base](name=name)


def _with_option(encoding: Encoding, option: str) -> Encoding:
    format = encoding.format
    has_fp32_scales = format.scale in ("fp32", "signed_fp32")
    key, _, value = option.partition("=")
    if key == "q_scalar":
        return replace(encoding, q_scalar=_number(value))
    if key == "sr":
        return replace(encoding, is_stochastic=True)
    if key == "unbiased":
        rounding: ScaleRounding = "nearest" if has_fp32_scales else "up"
        return replace(encoding, is_stochastic=True, scale_rounding=rounding)
    if key == "eden":
        return replace(encoding, is_eden=True)
    if key == "quest":
        if not format.is_mxfp4:
            raise UserError("quest is for MXFP4's powers of two, use mxfp4e2m1bnosr:quest")
        return replace(encoding, scale_from="rms", scale_rounding="down")
    if key in ("4over6", "4over6_448"):
        return replace(encoding, four_over_six=True, four_over_six_max=256.0 if key == "4over6" else 448.0)
    if key == "token_scale":
        if format.scale != "e4m3":
            raise UserError("token_scale is for NVFP4's tensor scale only, leave it out")
        return replace(encoding, format=replace(format, has_row_scales=True))
    if key == "fp32_scale":
        if not encoding.is_power_of_two:
            raise UserError("fp32_scale is for NVFP4's tensor scale only, leave it out")
        return replace(encoding, is_power_of_two=False)
    if key == "floor":
        if format.scale != "e8m0":
            raise UserError("floor is supported for E8M0 scales only, use mxfp4… or mxfp8…")
        return replace(encoding, scale_rounding="down")
    block, kinds = BLOCKS[key]
    if format.block is None or format.scale not in kinds:
        raise UserError(f"{key} does not fit the blocks of this format, leave it out")
    return replace(encoding, format=replace(format, block=block))


def _check_unbiased(encoding: Encoding) -> None:
    """Reject encodings that saturate, because the mean of a saturated element is not exact."""
    if encoding.scale_from == "mean":
        raise UserError(
            "unbiased does not support scales from the mean magnitude, which saturate elements: write sr"
        )
    if encoding.q_scalar < 1:
        raise UserError(
            f"unbiased does not support q_scalar={encoding.q_scalar:g}, which saturates elements: write sr, "
            "or q_scalar=1"
        )


def _number(text: str) -> float:
    try:
        if "_" not in text:  # Python reads 1_0 as 10, which is not intended here
            return float(text)
    except ValueError:
        pass
    raise UserError(f"q_scalar={text!r} is not a number: write it like 1.25")
