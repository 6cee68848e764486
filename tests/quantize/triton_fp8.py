"""The Triton kernels for FP8 against numbers computed one by one: `python triton_fp8.py cpu decode`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import itertools
import math
import sys
from unittest import mock

import torch
from fp8_operands import EVERY_SHIFT, FITTING, GRID, NOT_FITTING, error_bound, spread_matrix

from megalowbit.layers.matmul.fp8 import fits
from megalowbit.quantize.encoding import DEPTH, E4M3, E5M2
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.triton import launch_fp8
from megalowbit.quantize.triton.launch_fp8 import Fp8Side

LAYOUTS = {E4M3: (3, 7), E5M2: (2, 15)}  # bits of the mantissa, bias
UNTOUCHED = -77.0


def number(byte, dtype):
    """The number that an FP8 byte stands for; no byte of an exact operand is an infinity."""
    mantissa_bits, bias = LAYOUTS[dtype]
    sign, rest = -1.0 if byte & 0x80 else 1.0, byte & 0x7F
    if rest == 0x7F:
        return math.nan
    exponent, mantissa = rest >> mantissa_bits, (rest & ((1 << mantissa_bits) - 1)) / 2**mantissa_bits
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def check_decoding(device):
    """Every element under every exponent that fits, below a highest one that is large or small."""
    codes = [(7 * i) % 16 for i in range(32)]  # each code twice
    packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    elements = [(-1.0 if code & 8 else 1.0) * GRID[code & 7] for code in codes]
    for dtype, highest in itertools.product((E4M3, E5M2), (60, 127, 250)):
        exponents = [*range(highest, highest - DEPTH[dtype] - 1, -1), 255]  # the last block is NaN
        rows = len(exponents)
        stored = torch.tensor(packed, dtype=torch.uint8, device=device).repeat(rows, 1)
        scales = torch.tensor(exponents, dtype=torch.uint8, device=device).view(rows, 1)
        ends = torch.tensor([highest, -exponents[-2]], dtype=torch.int32, device=device)
        for transpose in (False, True):
            made = launch_fp8.decode(
                stored, scales.view(torch.float8_e8m0fnu), ends, rows, 32, dtype=dtype, transpose=transpose
            )
            numbers = made.numbers.view(torch.uint8)
            found = (numbers.t() if transpose else numbers).tolist()
            for exponent, row in zip(exponents, found, strict=True):
                for element, byte in zip(elements, row, strict=True):
                    expected = math.nan if exponent == 255 else element * 2.0 ** (exponent - 127)
                    restored = number(byte, dtype) * float(made.scale)
                    assert same(restored, expected), (dtype, highest, exponent, element, byte)


def same(one, other):
    """Equal, signs of zeros too."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other and math.copysign(1, one) == math.copysign(1, other)


def quantized(matrix, device):
    return quantizer("mxfp4e2m1bnosr").quantize(matrix.to(device), with_exponents=True)


def side(tensor, dtype, transpose):
    return Fp8Side(tensor.codes, tensor.scales, tensor.exponents, tuple(tensor.shape), dtype, transpose)


def corrected(left, right, dtypes, transposes=(False, False), out_dtype=torch.float32, programs=2):
    """A matrix after the kernel, and whether that has counted the product as overwritten."""
    (m, k), (k_again, n) = (
        tensor.shape[::-1] if transpose else tensor.shape
        for tensor, transpose in zip((left, right), transposes, strict=True)
    )
    assert k == k_again
    out = torch.full((m, n), UNTOUCHED, dtype=out_dtype, device=left.codes.device)
    counts = torch.zeros(2, dtype=torch.int32, device=out.device)
    sides = map(side, (left, right), dtypes, transposes)
    with mock.patch.object(launch_fp8, "PROGRAMS", programs):
        launch_fp8.correct(out, *sides, counts)
    assert counts.tolist() in ([1, 0], [1, 1])  # every product is counted, those overwritten too
    return out, counts.tolist() == [1, 1]


def lonely_matrix(rows, cols, exponents, seed):
    """The first exponent in one block, the last in all others: most sums have only its numbers."""
    matrix = spread_matrix(rows, cols, exponents[-1:], seed)
    matrix[0, :32] *= 2.0 ** (exponents[0] - exponents[-1])
    return matrix


def check_not_fitting(device):
    """Products that do not fit are those of float64, in all orders of memory and dtypes."""
    out_dtypes = {1: torch.bfloat16, 4: torch.bfloat16, 5: torch.float16}
    for index, (name, (a, b, dtypes)) in enumerate(NOT_FITTING.items()):
        every = list(itertools.product([False, True], repeat=2))
        out_dtype = out_dtypes.get(index, torch.float32)
        for transposes in every if index < 2 else every[index % 4 :][:1]:
            m, k, n = (80, 112, 144) if index < 2 else (16, 48, 32)
            left = quantized(lonely_matrix(*((k, m) if transposes[0] else (m, k)), a, 1), device)
            right = quantized(lonely_matrix(*((n, k) if transposes[1] else (k, n)), b, 2), device)
            exact = [
                tensor.operand(torch.float64, transpose=transpose)
                for tensor, transpose in zip((left, right), transposes, strict=True)
            ]
            expected, bound = error_bound(*exact, out_dtype)
            out, is_counted = corrected(left, right, dtypes, transposes, out_dtype)
            assert is_counted, name
            assert ((out.double() - expected).abs() <= bound).all(), name


def check_fitting(device):
    """Products that fit are left as they are, whatever the host thinks of them."""
    for a, b, dtypes in FITTING.values():
        left = quantized(spread_matrix(16, 96, a), device)
        right = quantized(spread_matrix(96, 32, b, 1), device)
        out, is_counted = corrected(left, right, dtypes)
        assert not is_counted
        assert out.eq(UNTOUCHED).all()


def check_spoiled(device):
    """NaN comes out of a NaN block, and of an operand that is infinite in bf16, as from the bf16 product."""
    matrix = spread_matrix(32, 96, [0, -20])
    matrix[3, 70] = torch.nan
    out, is_counted = corrected(
        quantized(matrix, device), quantized(spread_matrix(96, 32, [0], 1), device), (E4M3, E4M3)
    )
    assert is_counted
    assert out[3].isnan().all()
    assert int(out.isnan().sum()) == 32
    large, zeros = torch.full((16, 32), 3.5 * 2.0**126), torch.zeros(32, 16)
    out, is_counted = corrected(quantized(large, device), quantized(zeros, device), (E4M3, E4M3))
    assert is_counted
    assert out.isnan().all()
    out, is_counted = corrected(quantized(zeros, device), quantized(zeros.t(), device), (E5M2, E4M3))
    assert not is_counted
    assert out.eq(UNTOUCHED).all()


def check_rules(device):
    """The kernel and the host have the same rules."""
    zeros = quantized(torch.zeros(16, 32), device)
    seen = set()
    for (left, right), dtypes in itertools.product(EVERY_SHIFT, ((E4M3, E4M3), (E5M2, E4M3))):
        counts, out = torch.zeros(2, dtype=torch.int32, device=device), torch.empty(16, 16, device=device)
        sides = [
            side(zeros, dtype, transpose)._replace(exponents=exponents.to(device))
            for exponents, dtype, transpose in zip((left, right), dtypes, (False, True), strict=True)
        ]
        launch_fp8.correct(out, *sides, counts)
        expected = fits(left, right, dtypes)
        assert counts.tolist() == [1, not expected], (left, right, dtypes)
        seen.add(expected)
    assert seen == {True, False}


def main():
    device, group = torch.device(sys.argv[1]), sys.argv[2]
    if group == "decode":
        check_decoding(device)
    elif group == "rules":
        check_rules(device)
        check_fitting(device)
    else:
        check_not_fitting(device)
        check_spoiled(device)
    print("equal")


if __name__ == "__main__":
    main()
