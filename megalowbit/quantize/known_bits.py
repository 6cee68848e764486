"""Bits that every CPU kernel must make of given numbers: a miscompiled one shows before its use.

`answers` runs each entry point over each dtype, each order in memory and each rounding, and condenses what
comes out to a checksum; `KNOWN_BITS` are the checksums of the plain torch operations, on any machine. A
checksum differs if one bit does. All of it takes a few milliseconds.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, SCALE_DTYPES
from megalowbit.quantize.encoding import Encoded, Encoding
from megalowbit.quantize.philox import RandomKey

KEY = RandomKey(2**63 + 5, 2**33 + 7)
ENCODINGS: dict[str, tuple[Encoding, int | None]] = {
    "nearest": (Encoding(format=NVFP4), None),
    "stochastic": (Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up"), 0x5AC3),
    "four over six": (Encoding(format=NVFP4, four_over_six=True), None),
    "tiled": (Encoding(format=NVFP4_TILED, q_scalar=0.8), None),
    "MXFP4": (Encoding(format=MXFP4, scale_rounding="down"), None),
    "MXFP4 stochastic": (Encoding(format=MXFP4, is_stochastic=True, scale_rounding="up"), 0x1234),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KNOWN_BITS: dict[str, int] = {
    "nearest": 0x6918A2CC,
    "stochastic": 0xE920FEF3,
    "four over six": 0x4533972A,
    "tiled": 0x55CD40E1,
    "MXFP4": 0x9080EA9F,
    "MXFP4 stochastic": 0x54ECB4B3,
    "torch.float32 by rows": 0xBA1CAE84,
    "torch.float32 by columns": 0xBA1CAE84,
    "torch.float32 by neither": 0xBA1CAE84,
    "column sums of torch.float32": 0x32331A1C,
    "torch.bfloat16 by rows": 0xBA1CAE84,
    "torch.bfloat16 by columns": 0xBA1CAE84,
    "torch.bfloat16 by neither": 0xBA1CAE84,
    "column sums of torch.bfloat16": 0x32331A1C,
    "torch.float16 by rows": 0xBA1CAE84,
    "torch.float16 by columns": 0xBA1CAE84,
    "torch.float16 by neither": 0xBA1CAE84,
    "column sums of torch.float16": 0x32331A1C,
    "decoding e4m3 to torch.float32": 0x99410019,
    "decoding e4m3 to torch.float32, transposed": 0x3FA3AE14,
    "decoding e4m3 to torch.bfloat16": 0x013F6D09,
    "decoding e4m3 to torch.bfloat16, transposed": 0xABBC40F6,
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


def answers(
    encode: Callable[..., Encoded],
    decode: Callable[..., Tensor],
    scale_and_bias: Callable[..., Tensor],
    column_sums: Callable[..., Tensor],
) -> dict[str, int]:
    """Checksums of what functions with the signatures of `kernels_cpu` compute, by what was asked for."""
    found = {}
    wide, short = _wide_numbers(), _short_numbers()
    for name, (encoding, signs) in ENCODINGS.items():
        arguments = {"random_key": KEY, "signs": signs, "operand_dtype": torch.bfloat16, "with_counts": True}
        found[name] = _of_encoded(encode(wide.t().contiguous().t(), encoding, **arguments))
    for dtype in DTYPES:
        numbers = short.to(dtype)
        orders = {
            "rows": numbers,
            "columns": numbers.t().contiguous().t(),
            "neither": numbers.repeat_interleave(2, 1)[:, ::2],
        }
        for order, matrix in orders.items():
            encoded = encode(matrix, ENCODINGS["nearest"][0], operand_dtype=torch.float32)
            found[f"{dtype} by {order}"] = _of_encoded(encoded)
        found[f"column sums of {dtype}"] = _checksum(column_sums(numbers.repeat(13, 1)))
    for format, dtype, transpose in itertools.product((NVFP4, MXFP4), DTYPES[:2], (False, True)):
        packed = (
            torch.arange(40 * 256, dtype=torch.int32, device="cpu").mul(167).to(torch.uint8).view(40, 256)
        )
        scales = packed.flatten()[: 40 * 512 // format.block[1]].view(40, -1)
        scales = scales.view(SCALE_DTYPES[format.scale])
        decoded = decode(packed, scales, format, 40, 509, dtype, transpose=transpose)
        name = f"decoding {format.scale} to {dtype}" + (", transposed" if transpose else "")
        found[name] = _checksum(decoded.nan_to_num(nan=1.5))  # a NaN has many codes
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        for with_bias in (False, True):
            product = wide.to(dtype)  # fp16: with infinities
            out = torch.empty(product.shape, dtype=out_dtype, device="cpu")
            name = f"scaling {dtype} to {out_dtype}" + (" with bias" if with_bias else "")
            found[name] = _checksum(scale_and_bias(product, 0.3, wide[0] if with_bias else None, out))
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
