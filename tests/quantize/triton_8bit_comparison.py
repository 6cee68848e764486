"""Compare the Triton kernels of 8-bit formats with the reference, as `triton_comparison` does those of FP4.

A program of its own, because Triton chooses between compiler and interpreter once for a process. What the
interpreter costs grows with the number of programs, so most matrices fit one tile, with a case in each row.
"""

import itertools
import math
import os
import sys

import fp4_reference
import mixed_reference
import numpy as np
import philox_reference
import torch
from triton_comparison import bits

from megalowbit.formats.block_format import MIXED_INT8, BlockFormat
from megalowbit.formats.element import E2M1, E4M3, E5M2, INT4, INT8, INT8_E5M2
from megalowbit.quantize import backends, reference
from megalowbit.quantize.backends import can_encode
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.philox import RandomKey, random_fractions
from megalowbit.quantize.tensor_statistics import tensor_maximum
from megalowbit.quantize.triton import launch_fp4 as launch_triton
from megalowbit.quantize.triton import launch_fp32_scales as launch_triton_8bit

KEY = RandomKey(2**63 + 0x12345678ABCD, 2**40 + 5)
SIGNS = 0xA5C3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = (INT8, E4M3, E5M2, INT4, E2M1)
ROUNDINGS = ({}, {"is_stochastic": True})
MIXED_32 = BlockFormat(element=INT8_E5M2, block=(1, 32), scale="signed_fp32")
CPU = torch.device("cpu")


def format_of(element, block):
    return BlockFormat(element=element, block=block, scale="fp32")


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def special_rows(cols=250):
    """A case in each of 16 rows; the numbers of one row do not matter to another."""
    x = gaussian(16, cols, seed=1)
    x[1] *= 1e-41
    x[2] *= 2e-37
    x[3] = (x[3] * 1e38).clamp(-3.4e38, 3.4e38)
    x[4] *= torch.logspace(-44, 37, cols)
    x[5] = 0.0
    x[6] = -0.0
    x[7, ::16] = torch.tensor([30.0, -200.0]).repeat(cols)[: len(x[7, ::16])]
    x[8, 3], x[8, 17], x[8, 36:] = math.inf, math.nan, -math.inf
    x[8, 160:] = 1.0
    x[9, ::2] = 1e-30
    x[10] = torch.arange(cols) / 2 * (-1) ** torch.arange(cols)  # ties under a scale of 1, see below
    x[10, ::16] = 127.0
    x[11, ::128] = 90.0  # blocks of E5M2
    x[12, ::128], x[12, 20] = 90.0, 1e30
    x[13] = 1.0
    x[14, ::128] = 22.0  # near the line between the two
    x[15] = x[15].exp() * 1e-38
    return x


def check(x, encoding, operand_dtype=torch.bfloat16, **options):
    """Everything that comes out, against the plain torch path."""
    options = {"random_key": KEY, "operand_dtype": operand_dtype, "with_counts": True, **options}
    assert can_encode(launch_triton_8bit, EncodeRequest(x, encoding, operand_dtype=operand_dtype))
    ours, theirs = (
        path.encode(EncodeRequest(x, encoding, **options)) for path in (launch_triton_8bit, reference)
    )
    for field in ("codes", "scales", "tensor_scale", "operand", "counts"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None), (encoding, field)
        assert a is None or (a.dtype == b.dtype and a.shape == b.shape), (encoding, field)
        assert a is None or torch.equal(bits(a), bits(b)), (encoding, field, x.dtype, x.stride(), a, b)
    torch.testing.assert_close(ours.error, theirs.error, rtol=1e-6, atol=0)
    if encoding.format.has_tensor_scale and "tensor_amax" not in options:
        signs = options.get("signs")
        found = launch_triton_8bit.maximum(EncodeRequest(x, encoding, signs=signs))
        assert torch.equal(bits(found), bits(tensor_maximum(x.cpu(), encoding, signs))), (encoding, x)
    if encoding.format.scale == "signed_fp32":  # what a NaN is must not make a block of another kind
        assert torch.equal(torch.signbit(ours.scales), torch.signbit(theirs.scales)), encoding
    return ours


def check_bare(x, encoding, expected, **options):
    """Codes and scales do not depend on what else is asked for."""
    bare = launch_triton_8bit.encode(EncodeRequest(x, encoding, random_key=KEY, **options))
    assert torch.equal(bare.codes, expected.codes), encoding
    assert torch.equal(bits(bare.scales), bits(expected.scales)), encoding
    assert bare.operand is None
    assert bare.counts is None


def compare_blocks(device):
    x = special_rows().to(device)
    for element, rounding in itertools.product(ELEMENTS, ROUNDINGS):
        wide, narrow = (Encoding(format=format_of(element, (1, cols)), **rounding) for cols in (32, 16))
        check_bare(x, wide, check(x, wide, torch.float16))
        check(x.bfloat16(), narrow, torch.float32)
        turned = x[:, :13].half().t().contiguous().t()
        check(turned, wide)
    compare_odd_matrices(device, [narrow, Encoding(format=format_of(INT8, (1, 32)), is_stochastic=True)])
    tiled = Encoding(format=format_of(E4M3, (16, 16)), is_stochastic=True)
    check(gaussian(33, 75).to(device), tiled)
    check(x[:, :240], narrow, signs=SIGNS)
    check(x, Encoding(format=format_of(INT8, (1, 16)), q_scalar=0.3))
    check(x, Encoding(format=format_of(E5M2, (1, 32)), q_scalar=3e38))


def compare_odd_matrices(device, encodings):
    """Shapes and strides, each of several tiles or with little in one."""
    for encoding in encodings:
        for shape in ((1, 1), (3, 17), (35, 300)):
            check(gaussian(*shape, seed=shape[1]).to(device), encoding)
        tall = gaussian(70, 300, seed=5).to(device)
        check(tall.bfloat16().repeat_interleave(2, 1)[3:73:2, 4:400:2], encoding)  # neither is contiguous
        check(tall.t()[:70, :21], encoding)
        negated = torch.complex(tall[:9], tall[:9]).conj().imag  # the same memory, and a bit: "negated"
        assert negated.is_neg()
        check(negated, encoding)


def compare_one_scale(device):
    for element, rounding in itertools.product(ELEMENTS, ROUNDINGS):
        encoding = Encoding(format=format_of(element, None), **rounding)
        is_thorough = (element, rounding) in ((INT8, ROUNDINGS[0]), (E5M2, ROUNDINGS[1]))
        for number, row in enumerate(special_rows(40)[: 16 if is_thorough else 4]):
            x = row.to(device, DTYPES[number % 3]).view(4, 10)
            check(x, encoding, DTYPES[number % 2])
        check_bare(x, encoding, check(x, encoding, torch.float16))
    compare_odd_matrices(device, [encoding])
    encoding = Encoding(format=format_of(E4M3, None), q_scalar=0.7)
    check(gaussian(40, 32).to(device), encoding, signs=SIGNS)
    check(gaussian(40, 32).to(device), Encoding(format=format_of(INT8, None), q_scalar=3e38))


def compare_given_maxima(device):
    """A maximum is taken as it is; yet an infinity anywhere, or a maximum beyond fp32, spoils all."""
    x = gaussian(4, 40, seed=12).to(device)
    amaxes = (0.0, -0.0, 1e-42, 0.5, -2.0, 1e30, math.inf, math.nan)
    for amax, element in itertools.product(amaxes, (INT8, E4M3)):
        encoding = Encoding(format=format_of(element, None), is_stochastic=element is E4M3)
        check(x, encoding, tensor_amax=torch.tensor(amax, device=device))
    amax = torch.tensor(3.0, device=device)
    for spoiler in (math.inf, -math.inf, math.nan):
        spoiled = gaussian(34, 300).to(device)
        spoiled[33, 250] = spoiler
        encoding = Encoding(format=format_of(INT8, None))
        got = check(spoiled, encoding, tensor_amax=amax)
        assert got.tensor_scale.isnan()
        assert not got.codes.any()
        check_bare(spoiled, encoding, got, tensor_amax=amax)
    check(x, Encoding(format=format_of(INT8, None), q_scalar=3e38), tensor_amax=amax)
    check(x, Encoding(format=MIXED_INT8), tensor_amax=amax)  # of no use here
    check(x, Encoding(format=format_of(INT8, (1, 16))), tensor_amax=amax)


def compare_mixed(device):
    for format, rounding in itertools.product((MIXED_INT8, MIXED_32), ROUNDINGS):
        encoding = Encoding(format=format, **rounding)
        for dtype in DTYPES:
            x = special_rows().to(device, dtype)
            got = check(x, encoding, dtype)
        assert torch.signbit(got.scales).any()
        assert not torch.signbit(got.scales).all()
        check_bare(x, encoding, got)
        check(x[:, :60].t().contiguous().t(), encoding)
        check(x[:, :240].float(), encoding, signs=SIGNS)
    compare_odd_matrices(device, [Encoding(format=MIXED_INT8, is_stochastic=True)])
    for format in (MIXED_INT8, MIXED_32):
        compare_choices(device, format)


def compare_choices(device, format):
    """Blocks, whole and cut short, whose sums of codes lie just below, on and above the line."""
    size = format.block[1]
    for elements in (size, size - 11, 2, 1):
        line = math.ceil(141 * (elements - 1) / 32)  # the first sum that stays INT8
        x = torch.zeros(16, elements)
        for row, total in enumerate(range(line - 8, line + 8)):
            others = torch.arange(elements - 1)
            x[row, 1:] = max(total, 0) // max(elements - 1, 1)
            x[row, 1:] += others < max(total, 0) % max(elements - 1, 1)
        x[:, 0] = 127.0
        got = check(x.to(device), Encoding(format=format), torch.float32)
        is_e5m2 = torch.signbit(got.scales[:, 0]).tolist()
        expected = [32 * (x[row, 1:].sum().item()) < 141 * (elements - 1) for row in range(16)]
        assert is_e5m2 == expected, (elements, is_e5m2)


def compare_steps(device):
    """Nearest: ties and their neighbours. Stochastic: numbers that the random bits just raise, or not."""
    for element in ELEMENTS:
        format, amax = format_of(element, None), torch.tensor(element.max, device=device)
        grid = torch.tensor(element.grid, dtype=torch.float64)
        middles = ((grid[1:] + grid[:-1]) / 2).float()
        around = (torch.nextafter(middles, torch.tensor(way)) for way in (-math.inf, math.inf))
        x = torch.cat([middles, *around, grid.float(), torch.tensor([3e38, 1e-40])])
        x = torch.cat([x, -x]).to(device)
        got = check(x.view(1, -1), Encoding(format=format), torch.float32, tensor_amax=amax)
        nearest = [
            fp4_reference.nearest_code(abs(number), element.grid) for number in x.double().cpu().tolist()
        ]
        assert torch.equal(got.operand[0].abs().cpu(), grid[nearest].float()), element

        fraction = random_fractions(256, KEY, CPU).flatten().double() / 2**24  # of a matrix of 16 × 256
        code = torch.arange(len(fraction)) % (len(grid) - 1)
        x = grid[code] + (grid[code + 1] - grid[code]) * (1 - fraction)
        steps = (
            torch.arange(len(fraction)) // (len(grid) - 1) % 33 - 16
        ).int()  # from one fp32 number to the next
        x = (x.float().view(torch.int32) + steps).view(torch.float32)
        encoding = Encoding(format=format, is_stochastic=True)
        got = check(x.view(16, 256).abs().to(device), encoding, tensor_amax=amax)


def compare_with_loops(device):
    x = special_rows(40)[[0, 2, 4, 5, 6, 7, 8, 13]]
    drawn = np.array(
        [philox_reference.random_fractions(group, *KEY) for group in range(8 * 128 // 16)]
    ).ravel()
    for element, block in itertools.product((INT8, E4M3, E5M2), ((1, 16), (1, 32), None)):
        format = format_of(element, block)
        shape = format.padded(*x.shape)
        matrix = x if block else x[:6]
        for random in (None, drawn[: math.prod(shape)].reshape(shape)[: len(matrix)]):
            by_hand = fp4_reference.Blocks(
                matrix.numpy(), grid=element.grid, block=block, scale="fp32", random=random
            )
            encoding = Encoding(format=format, is_stochastic=random is not None)
            got = launch_triton_8bit.encode(
                EncodeRequest(matrix.to(device), encoding, random_key=KEY, operand_dtype=torch.float32)
            )
            codes = by_hand.codes
            is_negative = codes >= by_hand.sign_code  # the reference puts the sign above the grid
            codes = codes - is_negative * by_hand.sign_code + is_negative * element.sign_code
            assert np.array_equal(got.codes.cpu().numpy(), codes), encoding
            stored = got.tensor_scale.view(1, 1) if block is None else got.scales
            stored_by_hand = torch.from_numpy(by_hand.stored.astype(np.float32))
            assert torch.equal(bits(stored), bits(stored_by_hand)), encoding
            values = torch.from_numpy(by_hand.values[:, :40].copy())
            assert torch.equal(bits(got.operand), bits(values)), encoding
    for random in (None, drawn.reshape(8, 128)):
        scales, codes, may_differ = mixed_reference.encoded(x.numpy(), 128, random)
        encoding = Encoding(format=MIXED_INT8, is_stochastic=random is not None)
        got = launch_triton_8bit.encode(EncodeRequest(x.to(device), encoding, random_key=KEY))
        assert torch.equal(bits(got.scales), bits(torch.from_numpy(scales))), encoding
        assert not ((got.codes.cpu().numpy() != codes) & ~may_differ).any(), encoding


def compare_decoding(device):
    rows, cols = 19, 170
    numbers = torch.tensor([1.0, 3e-39, -2.5, 1e38, math.nan, -0.0, math.inf, 7e4, -math.nan])
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    formats = [format_of(element, block) for element in ELEMENTS for block in ((1, 16), None)]
    formats += [format_of(E4M3, (16, 16)), format_of(INT4, (1, 32)), MIXED_INT8, MIXED_32]
    for format in formats:
        code_shape, scale_shape = format.codes_shape(rows, cols), format.scales_shape(rows, cols)
        codes = (torch.arange(math.prod(code_shape)) * 167 % 256).to(torch.uint8).view(code_shape)
        scales = torch.cat([numbers, payloads]).repeat(rows * cols)[: math.prod(scale_shape)]
        buffer = torch.cat([codes.new_zeros(1), codes.flatten()])
        shifted = buffer.to(device)[1:].view(code_shape)  # not on an address of whole words
        packed = (shifted, scales.view(scale_shape).to(device), format, rows, cols)
        for dtype, transpose in itertools.product(DTYPES, (False, True)):
            ours, theirs = (
                path.decode(DecodeRequest(*packed, dtype, transpose=transpose))
                for path in (launch_triton_8bit, reference)
            )
            assert ours.shape == theirs.shape
            assert ours.is_contiguous()
            assert torch.equal(bits(ours), bits(theirs)), (format, dtype, transpose)


def compare_dispatch(device):
    """The backend's name leads to these kernels, and decodes what it has encoded."""
    os.environ[backends.BACKEND_VARIABLE] = "triton"
    x = gaussian(5, 300).to(device)
    x[0, 7] = 100.0
    for format in (MIXED_INT8, format_of(INT8, None)):
        assert backends._kernels(backends.backend_of(x), format) is launch_triton_8bit
        ours, theirs = (
            path.encode(EncodeRequest(x, Encoding(format=format))) for path in (backends, reference)
        )
        assert torch.equal(ours.codes, theirs.codes)
        decoded = [
            path.decode(DecodeRequest(ours.codes, ours.scales, format, *x.shape, torch.bfloat16))
            for path in (backends, reference)
        ]
        assert torch.equal(bits(decoded[0]), bits(decoded[1]))


GROUPS = {
    "blocks": (compare_blocks,),
    "one_scale": (compare_one_scale, compare_given_maxima),
    "mixed": (compare_mixed, compare_dispatch),
    "numbers": (compare_steps, compare_with_loops),
    "decoding": (compare_decoding,),
}


def main():
    device, group = torch.device(sys.argv[1]), sys.argv[2]
    assert launch_triton.is_available(device)
    for compare in GROUPS[group]:
        compare(device)
    print("equal")


if __name__ == "__main__":
    main()
