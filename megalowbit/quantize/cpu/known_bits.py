"""Checksums of kernel results for given inputs, which detect a miscompiled library before it is used.

`answers` runs each function for each dtype, memory order and rounding, and computes a checksum of the
results. `KNOWN_BITS` and `KNOWN_BITS_8BIT` are the checksums of plain torch operations, the same on any
machine. A single different bit changes a checksum. The test takes a few milliseconds.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from megalowbit.formats.block_format import (
    MIXED_INT8,
    MXFP4,
    NVFP4,
    NVFP4_TILED,
    SCALE_DTYPES,
    BlockFormat,
)
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest, Encoding
from megalowbit.quantize.philox import RandomKey

KEY = RandomKey(2**63 + 5, 2**33 + 7)
ENCODINGS: dict[str, tuple[Encoding, int | None]] = {
    "nearest": (Encoding(format=NVFP4), None),
    "stochastic": (Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up"), 0x5AC3),
    "four over six": (Encoding(format=NVFP4, four_over_six=True), None),
    "power of two": (Encoding(format=NVFP4, is_power_of_two=True), None),
    "power of two, stochastic": (
        Encoding(format=NVFP4, is_power_of_two=True, is_stochastic=True, scale_rounding="up"),
        0x5AC3,
    ),
    "tiled": (Encoding(format=NVFP4_TILED, q_scalar=0.8), None),
    "MXFP4": (Encoding(format=MXFP4, scale_rounding="down"), None),
    "MXFP4 stochastic": (Encoding(format=MXFP4, is_stochastic=True, scale_rounding="up"), 0x1234),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KNOWN_BITS: dict[str, int] = {
    "nearest": 0x6918A2CC,
    "stochastic": 0xEF2D3766,
    "four over six": 0x4533972A,
    "tiled": 0x55CD40E1,
    "MXFP4": 0x9080EA9F,
    "MXFP4 stochastic": 0x1CDDB4DE,
    **{f"{dtype} by {order}": 0xBA1CAE84 for dtype in DTYPES for order in ("rows", "columns", "neither")},
    **{f"column sums of {dtype}": 0x32331A1C for dtype in DTYPES},
    "decoding e4m3 to torch.float32": 0x99410019,
    "decoding e4m3 to torch.float32, transposed": 0x3FA3AE14,
    "decoding e4m3 to torch.bfloat16": 0x013F6D09,
    "decoding e4m3 to torch.bfloat16, transposed": 0xABBC40F6,
    "power of two": 0x1DDE0D2A,
    "power of two, stochastic": 0xCCE97FC8,
    "decoding e4m3 to torch.float32, scaled": 0xA921BB52,
    "decoding e4m3 to torch.float32, transposed, scaled": 0x7A8A68ED,
    "decoding e4m3 to torch.bfloat16, scaled": 0x3B710784,
    "decoding e4m3 to torch.bfloat16, transposed, scaled": 0x51E56216,
    "decoding e8m0 to torch.float32": 0x15505289,
    "decoding e8m0 to torch.float32, transposed": 0xB1EF67CD,
    "decoding e8m0 to torch.bfloat16": 0xA7CDB2A3,
    "decoding e8m0 to torch.bfloat16, transposed": 0x645DE2BE,
    "scaling torch.float32 to torch.float32": 0x89BAADBC,
    "scaling torch.float32 to torch.float32 with bias": 0x0EE83B91,
    "scaling torch.float32 to torch.bfloat16": 0xB750E8C8,
    "scaling torch.float32 to torch.bfloat16 with bias": 0x782103BC,
    "scaling torch.float32 to torch.float16": 0x91D91374,
    "scaling torch.float32 to torch.float16 with bias": 0x4926C051,
    "scaling torch.bfloat16 to torch.float32": 0x42D5EEFA,
    "scaling torch.bfloat16 to torch.float32 with bias": 0x24BADD0D,
    "scaling torch.bfloat16 to torch.bfloat16": 0xA6C7285F,
    "scaling torch.bfloat16 to torch.bfloat16 with bias": 0x8C566569,
    "scaling torch.bfloat16 to torch.float16": 0xDCDF079E,
    "scaling torch.bfloat16 to torch.float16 with bias": 0xABA46EED,
    "scaling torch.float16 to torch.float32": 0xCEE03B04,
    "scaling torch.float16 to torch.float32 with bias": 0xCE0317B3,
    "scaling torch.float16 to torch.bfloat16": 0xB678077A,
    "scaling torch.float16 to torch.bfloat16 with bias": 0x6E2CDC4F,
    "scaling torch.float16 to torch.float16": 0x440CE88D,
    "scaling torch.float16 to torch.float16 with bias": 0x860234DC,
}

FORMATS_8BIT: dict[str, BlockFormat] = {
    **{
        each.name: BlockFormat(element=each, block=None, scale="fp32")
        for each in (INT8, INT4, E2M1, E3M2, E4M3, E5M2)
    },
    "blocks": BlockFormat(element=E4M3, block=(1, 32), scale="fp32"),
    "tiles": BlockFormat(element=INT4, block=(16, 16), scale="fp32"),
    "mixed blocks": MIXED_INT8,
}
ROUNDINGS_8BIT = ("nearest", "stochastic")
KNOWN_BITS_8BIT: dict[str, int] = {
    "int8, nearest": 0x74E098F4,
    "decoding int8, nearest": 0xBDCAF24C,
    "int8, stochastic": 0x7B618689,
    "decoding int8, stochastic": 0x1268787B,
    "int4, nearest": 0x93357B95,
    "decoding int4, nearest": 0xA9F1DC7C,
    "int4, stochastic": 0x9E00E824,
    "decoding int4, stochastic": 0xEC473AD2,
    "e2m1, nearest": 0x3D6363D8,
    "decoding e2m1, nearest": 0x2EEB9B93,
    "e2m1, stochastic": 0x5607EBA6,
    "decoding e2m1, stochastic": 0x78462C5D,
    "e3m2, nearest": 0x8D5D5980,
    "decoding e3m2, nearest": 0x1C6CA187,
    "e3m2, stochastic": 0x641D2C2B,
    "decoding e3m2, stochastic": 0xFB07C747,
    "e4m3, nearest": 0xA03F19DA,
    "decoding e4m3, nearest": 0x51A9A02D,
    "e4m3, stochastic": 0xC84B6DA4,
    "decoding e4m3, stochastic": 0xC551DF50,
    "e5m2, nearest": 0x86C83A59,
    "decoding e5m2, nearest": 0xB865A706,
    "e5m2, stochastic": 0xF87D546F,
    "decoding e5m2, stochastic": 0xCC7AE142,
    "blocks, nearest": 0xC63D4D23,
    "decoding blocks, nearest": 0xB029DD94,
    "blocks, stochastic": 0x8A1CF608,
    "decoding blocks, stochastic": 0xC8E474D6,
    "tiles, nearest": 0x4033F4F0,
    "decoding tiles, nearest": 0xE4B7F8C8,
    "tiles, stochastic": 0x15901419,
    "decoding tiles, stochastic": 0x3A90552D,
    "mixed blocks, nearest": 0xDDA6AD04,
    "decoding mixed blocks, nearest": 0xF15BF985,
    "mixed blocks, stochastic": 0xEE552E1A,
    "decoding mixed blocks, stochastic": 0x00CD45AA,
    **{f"{dtype} by {order}": 0x8F1C2552 for dtype in DTYPES for order in ("rows", "neither")},
    **{
        f"{dtype} by {order} with a given maximum": 0x701E1DCF
        for dtype in DTYPES
        for order in ("rows", "neither")
    },
}


def answers(
    encode: Callable[[EncodeRequest], Encoded],
    decode: Callable[[DecodeRequest], Tensor],
    scale_and_bias: Callable[..., Tensor],
    column_sums: Callable[..., Tensor],
) -> dict[str, int]:
    """Checksums of what functions with the signatures of `cpu.fp4` compute, by what was asked for."""
    found = {}
    wide, short = _wide_numbers(), _short_numbers()
    for name, (encoding, signs) in ENCODINGS.items():
        x = wide.t().contiguous().t()
        request = EncodeRequest(x, encoding, KEY, signs, operand_dtype=torch.bfloat16, with_counts=True)
        found[name] = _of_encoded(encode(request))
    for dtype in DTYPES:
        numbers = short.to(dtype)
        orders = {
            "rows": numbers,
            "columns": numbers.t().contiguous().t(),
            "neither": numbers.repeat_interleave(2, 1)[:, ::2],
        }
        for order, matrix in orders.items():
            encoded = encode(EncodeRequest(matrix, ENCODINGS["nearest"][0], operand_dtype=torch.float32))
            found[f"{dtype} by {order}"] = _of_encoded(encoded)
        found[f"column sums of {dtype}"] = _checksum(column_sums(numbers.repeat(13, 1)))
    for format, dtype, transpose in itertools.product((NVFP4, MXFP4), DTYPES[:2], (False, True)):
        packed = (
            torch.arange(40 * 256, dtype=torch.int32, device="cpu").mul(167).to(torch.uint8).view(40, 256)
        )
        scales = packed.flatten()[: 40 * 512 // format.block[1]].view(40, -1)
        scales = scales.view(SCALE_DTYPES[format.scale])
        decoded = decode(DecodeRequest(packed, scales, format, 40, 509, dtype, transpose))
        name = f"decoding {format.scale} to {dtype}" + (", transposed" if transpose else "")
        found[name] = _checksum(decoded.nan_to_num(nan=1.5))  # a NaN has many codes
        if format is NVFP4:
            scale = torch.full((), 2.0**-7, dtype=torch.float32, device="cpu")
            decoded = decode(DecodeRequest(packed, scales, format, 40, 509, dtype, transpose, scale))
            found[f"{name}, scaled"] = _checksum(decoded.nan_to_num(nan=1.5))
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        for with_bias in (False, True):
            product = wide.to(dtype)  # fp16: with infinities
            out = torch.empty(product.shape, dtype=out_dtype, device="cpu")
            name = f"scaling {dtype} to {out_dtype}" + (" with bias" if with_bias else "")
            found[name] = _checksum(scale_and_bias(product, 0.3, wide[0] if with_bias else None, out))
    return found


def answers_8bit(
    encode: Callable[[EncodeRequest], Encoded], decode: Callable[[DecodeRequest], Tensor]
) -> dict[str, int]:
    """As `answers`, of functions with the signatures of `cpu.fp32_scales`."""
    found = {}
    wide, short = _wide_numbers(), _short_numbers().repeat(1, 3)
    for (name, format), rounding in itertools.product(FORMATS_8BIT.items(), ROUNDINGS_8BIT):
        encoding = Encoding(format=format, is_stochastic=rounding == "stochastic")
        x, signs = (wide.t().contiguous().t(), 0x5AC3) if encoding.is_stochastic else (short, None)
        request = EncodeRequest(x, encoding, KEY, signs, operand_dtype=torch.bfloat16, with_counts=True)
        encoded = encode(request)
        found[f"{name}, {rounding}"] = _of_encoded(encoded)
        packed = DecodeRequest(encoded.codes, encoded.scales, format, x.shape[0], x.shape[1], torch.float32)
        wanted = itertools.product(DTYPES, (False, True))
        decoded = [decode(packed._replace(dtype=dtype, transpose=transpose)) for dtype, transpose in wanted]
        found[f"decoding {name}, {rounding}"] = _checksum(*decoded)
    for dtype, amax in itertools.product(DTYPES, (None, 0.75)):
        numbers = short.to(dtype)
        given = None if amax is None else torch.full((), amax, dtype=torch.float32, device="cpu")
        for order, x in (("rows", numbers), ("neither", numbers.repeat_interleave(2, 1)[:, ::2])):
            encoded = encode(EncodeRequest(x, Encoding(format=FORMATS_8BIT["int8"]), tensor_amax=given))
            found[f"{dtype} by {order}" + (" with a given maximum" if amax else "")] = _of_encoded(encoded)
    return found


def _wide_numbers() -> Tensor:
    """fp32 (20, 96), of many magnitudes, with zeros of both signs."""
    mantissas = [(i * 2654435761 >> 7) % 8191 - 4095 for i in range(20 * 96)]
    numbers = [number * 2.0 ** (i * i // 7 % 29 - 20) * (i % 11 > 0) for i, number in enumerate(mantissas)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").view(96, 20).t().contiguous()


def _short_numbers() -> Tensor:
    """fp32 (25, 90) that bf16 and fp16 hold exactly, the least ones of fp16 among them."""
    mantissas = [(i * 2654435761 >> 9) % 255 - 127 for i in range(25 * 90)]
    numbers = [number * 2.0 ** (i * i // 5 % 25 - 20) for i, number in enumerate(mantissas)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").view(25, 90)


def _of_encoded(encoded: Encoded) -> int:
    parts = (encoded.codes, encoded.scales, encoded.tensor_scale, encoded.operand, encoded.counts)
    return _checksum(*(part for part in parts if part is not None))


def _checksum(*parts: Tensor) -> int:
    crc = 0
    for part in parts:
        part = part.contiguous()
        crc = zlib.crc32(ctypes.string_at(part.data_ptr(), part.nbytes), crc)
    return crc
