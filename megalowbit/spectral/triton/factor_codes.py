"""The Triton kernel that quantises both factors of a split to NVFP4; launched by `launch_factor_codes`.

It also writes what products read: U·diag(values) and Vᵀ, of the quantised factors. As launches of the
quantizer these are three, each as short as a launch can be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.fp4 import (
    GROUP,
    _block_maxima,
    _expand,
    _load,
    _store_codes,
    _store_values,
)
from megalowbit.quantize.triton.fp8 import _rounded_to_bf16
from megalowbit.quantize.triton.numbers import (
    ELEMENT_MAX,
    _constant,
    _divide,
    _element,
    _encode_scale,
    _nearest,
    _two_level,
)


@triton.jit
def _quantized(
    x, amax, codes, scales, tensor_scale, program, k, cols, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr
):
    """Quantise a tile of x (k, cols), bf16; returns rows, groups and the numbers that the codes stand for."""
    groups = tl.cdiv(cols, GROUP)
    tiles = tl.cdiv(groups, TILE_GROUPS)
    row = (program // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    group = (program % tiles) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    numbers = _load(x, row, group, k, cols, cols, 1, 0, "bf16", False)
    encode_scale = _encode_scale(tl.load(amax), 448.0, False, True)
    inverse = _divide(_constant(1.0), encode_scale)
    if program == 0:
        tl.store(tensor_scale, inverse)
    maxima = _block_maxima(numbers, 1.0, 1, GROUP)
    scale, decoded, encode, _ = _two_level(maxima, encode_scale, ELEMENT_MAX, False)
    code = _nearest(numbers * _expand(encode, TILE_ROWS, TILE_GROUPS)[:, :, None])
    factor = _expand(decoded, TILE_ROWS, TILE_GROUPS)[:, :, None]
    _store_codes(code, factor == factor, codes, row, group, k, groups, 4)
    is_inside = (row[:, None] < k) & (group[None, :] < groups)
    offset = row[:, None].to(tl.int64) * groups + group[None, :]
    tl.store(scales + offset, scale.to(tl.uint8), mask=is_inside)
    return row, group, _element(code) * factor * inverse


@triton.jit
def encode_kernel(
    left, right, left_amax, right_amax, values, left_codes, left_scales, left_scale, right_codes,
    right_scales, right_scale, tall, flat, k, rows, cols, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of Uᵀ (k, rows) and Vᵀ (k, cols), `tall` (rows, k) and `flat` (k, cols), in bf16.

    The first programs process Uᵀ. `left_amax` and `right_amax` are the factors' largest magnitudes.
    """
    program = tl.program_id(0)
    column = tl.arange(0, GROUP)[None, :]
    programs_left = tl.cdiv(k, TILE_ROWS) * tl.cdiv(tl.cdiv(rows, GROUP), TILE_GROUPS)
    if program < programs_left:
        row, group, numbers = _quantized(
            left, left_amax, left_codes, left_scales, left_scale, program, k, rows, TILE_ROWS, TILE_GROUPS
        )
        value = tl.load(values + row, mask=row < k, other=0.0)
        col = (group[:, None] * GROUP + column)[None, :, :]
        offset = col.to(tl.int64) * k + row[:, None, None]
        is_inside = (row[:, None, None] < k) & (col < rows)
        tl.store(tall + offset, _rounded_to_bf16(numbers * value[:, None, None]), mask=is_inside)
    else:
        row, group, numbers = _quantized(
            right, right_amax, right_codes, right_scales, right_scale, program - programs_left, k, cols,
            TILE_ROWS, TILE_GROUPS,
        )  # fmt: skip
        _store_values(numbers, flat, row, group[:, None] * GROUP + column, k, cols, cols, 1, "bf16")
