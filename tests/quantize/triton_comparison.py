"""Compare the Triton kernels with the reference, bit for bit: `python triton_comparison.py cpu nearest`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import itertools
import math
import os
import subprocess
import sys

import fp4_reference
import torch

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED
from megalowbit.quantize import reference
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.tensor_statistics import tensor_maximum
from megalowbit.quantize.triton import launch_fp4 as launch_triton
from megalowbit.quantize.triton import launch_fp8

KEY = RandomKey(2**63 + 0x12345678ABCD, 2**40 + 5)
ENCODINGS = {
    "nearest": [Encoding(format=NVFP4), Encoding(format=NVFP4, scale_rounding="up", q_scalar=0.8)],
    "stochastic": [
        Encoding(format=NVFP4, is_stochastic=True),
        Encoding(format=MXFP4, is_stochastic=True, scale_rounding="up"),
    ],
    "tiled": [Encoding(format=NVFP4_TILED)],
    "tiled_stochastic": [Encoding(format=NVFP4_TILED, is_stochastic=True, scale_rounding="up")],
    "mxfp4": [
        Encoding(format=MXFP4, scale_rounding="down"),
        Encoding(format=MXFP4, scale_rounding="up", q_scalar=1.25),
    ],
    "four_over_six": [Encoding(format=NVFP4, four_over_six=True)],
    "power_of_two": [
        Encoding(format=NVFP4, is_power_of_two=True),
        Encoding(format=NVFP4_TILED, is_power_of_two=True, scale_rounding="up"),
    ],
}
FP8 = {torch.float8_e4m3fn: (14, 6), torch.float8_e5m2: (28, 13)}  # reach and exponent of the largest block


def compare_in_a_process(device, group, program=__file__, **environment):
    command = [sys.executable, "-W", "ignore", program, device, group]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "equal\n"


def bits(tensor):
    """All bits, signs of zeros too; but one NaN is as good as another."""
    if tensor.dtype.itemsize > 1 and tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def matrices(is_large):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    yield "random", normal(33, 75)
    yield "odd", normal(3, 17)
    yield "single", normal(1, 1)
    yield "zeros", torch.zeros(5, 40)
    yield "negative zeros", -torch.zeros(2, 32)
    yield "subnormal", normal(5, 100) * 1e-40
    yield "huge", normal(5, 64) * 1e38
    yield (
        "many magnitudes",
        normal(18, 70) * torch.exp2(torch.randint(-60, 60, (18, 70), generator=generator)),
    )
    spoiled = normal(20, 96)
    spoiled[0, 0], spoiled[3, 40], spoiled[19, 95] = torch.nan, torch.inf, -torch.inf
    yield "spoiled", spoiled
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8).view(4, 16)
    yield "ties", ties * torch.tensor([[1.0], [-1.0], [2.0], [0.5]])
    if is_large:
        yield "large", normal(1037, 2083)


def variants(name, x):
    """The matrix in every dtype and with every kind of strides, or in one where the numbers are the point."""
    yield x
    if name in ("random", "large"):
        yield x.half()
        yield x.bfloat16()
        yield x.bfloat16().t().contiguous().t()  # columns contiguous
        yield x.repeat_interleave(2, 1)[:, ::2]  # neither


def check(name, x, encoding, operand_dtype=torch.bfloat16, **arguments):
    arguments |= {"random_key": KEY, "operand_dtype": operand_dtype, "with_counts": True}
    ours, theirs = (
        launch_triton.encode(EncodeRequest(x, encoding, **arguments)),
        reference.encode(EncodeRequest(x, encoding, **arguments)),
    )
    for field in ("codes", "scales", "tensor_scale", "operand", "counts"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None), (name, field)
        assert a is None or (a.dtype == b.dtype and torch.equal(bits(a), bits(b))), (name, x, encoding, field)
    torch.testing.assert_close(ours.error, theirs.error, rtol=1e-6, atol=0)
    if encoding.format.has_tensor_scale and "tensor_amax" not in arguments:
        signs = arguments.get("signs")
        found = launch_triton.maximum(EncodeRequest(x, encoding, signs=signs))
        assert torch.equal(bits(found), bits(tensor_maximum(x.cpu(), encoding, signs))), (name, x, encoding)
    bare = launch_triton.encode(
        EncodeRequest(x, encoding, **arguments | {"operand_dtype": None, "with_counts": False})
    )
    for field in ("codes", "scales"):
        assert torch.equal(bits(getattr(bare, field)), bits(getattr(theirs, field))), (name, "alone", field)
    assert bare.operand is None
    assert bare.counts is None


def compare_few(device):
    """Tiles of one encoding, for the quick tests: two tiles with a rest, tiny numbers, numbers that spoil."""
    (encoding,) = ENCODINGS["tiled"]
    for name, x in matrices(is_large=False):
        if name in ("random", "subnormal", "spoiled"):
            check(name, x.to(device), encoding)


def compare_encoding(group, device):
    is_large = device.type == "cuda"
    for (name, x), encoding in itertools.product(matrices(is_large), ENCODINGS[group]):
        for variant in variants(name, x):
            check(name, variant.to(device), encoding)
    x = torch.randn(33, 75, generator=torch.Generator().manual_seed(8)).to(device)
    negated = torch.complex(x, x).conj().imag  # the same memory, with a bit that says "negated"
    assert negated.is_neg()
    check("negated", negated, ENCODINGS[group][0])
    for encoding in ENCODINGS[group]:
        check("fp32 operand", x, encoding, torch.float32)
        check("given maximum", x, encoding, tensor_amax=torch.tensor(2.0, device=device))
        if encoding.format is not NVFP4_TILED:
            padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
            check("hadamard", padded, encoding, signs=0xA5C3)
            check("hadamard", padded.bfloat16().t().contiguous().t(), encoding, signs=0x1)


def compare_with_loops(device):
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(11))
    x[1, 3], x[2, 20:30], x[4], x[5, :16] = torch.nan, -0.0, 1e-42, 0.0
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties = torch.zeros(1, 48)
    ties[0, ::16], ties[0, 1:8] = 6.0, middles
    ties[0, 17:24] = torch.nextafter(middles, torch.tensor(math.inf))
    ties[0, 33:40] = -torch.nextafter(middles, torch.tensor(0.0))
    cases = itertools.product((x, ties), itertools.chain(*ENCODINGS.values()), (None, 0x5AC3))
    for matrix, encoding, signs in cases:
        expected = fp4_reference.encoded(matrix.numpy(), encoding, KEY, signs)
        ours = launch_triton.encode(
            EncodeRequest(
                matrix.to(device), encoding, random_key=KEY, signs=signs, operand_dtype=torch.float32
            )
        )
        rows = len(matrix)
        codes = torch.from_numpy(fp4_reference.packed(expected.codes[:rows], 4))
        assert torch.equal(ours.codes.cpu(), codes), (encoding, signs)
        assert ours.scales.view(torch.uint8).tolist() == expected.stored.tolist(), (encoding, signs)
        values = torch.from_numpy(expected.operand[:rows, :48].copy())
        assert torch.equal(bits(ours.operand), bits(values)), (encoding, signs)
        assert expected.tensor_scale is None or ours.tensor_scale.item() == expected.tensor_scale


def compare_given_maxima(device):
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(12)).to(device)
    for amax, encoding in itertools.product(
        (0.0, 1e-42, 1e30, math.inf, math.nan), itertools.chain(*ENCODINGS.values())
    ):
        if encoding.format is not MXFP4:
            check("maximum", x, encoding, tensor_amax=torch.tensor(amax, device=device))


def compare_decoding(device):
    formats = (NVFP4, NVFP4_TILED, MXFP4)
    for (name, x), format in itertools.product(matrices(device.type == "cuda"), formats):
        encoding = Encoding(format=format, scale_rounding="up", is_power_of_two=format.scale == "e4m3")
        encoded = reference.encode(EncodeRequest(x.to(device), encoding))
        packed = (encoded.codes, encoded.scales, format, *x.shape)
        wanted = (
            (False, torch.float32, True),
            (True, torch.float32, False),
        )  # transpose, dtype, times the scale
        wanted += ((True, torch.bfloat16, True), (False, torch.bfloat16, False))
        for transpose, dtype, is_scaled in wanted:
            scale = encoded.tensor_scale if is_scaled else None
            a = launch_triton.decode(DecodeRequest(*packed, dtype, transpose, scale))
            b = reference.decode(DecodeRequest(*packed, dtype, transpose, scale))
            assert a.shape == b.shape, name
            assert torch.equal(bits(a), bits(b)), (name, format, transpose, dtype)
    buffer = torch.cat([encoded.codes.new_zeros(1), encoded.codes.flatten()])
    shifted = buffer[1:].view(encoded.codes.shape)  # not on an address of whole words
    assert shifted.data_ptr() % 4
    a = launch_triton.decode(DecodeRequest(shifted, *packed[1:], torch.float32))
    assert torch.equal(bits(a), bits(reference.decode(DecodeRequest(*packed, torch.float32))))


def compare_fp8(device):
    for (name, x), dtype in itertools.product(matrices(device.type == "cuda"), FP8):
        request = EncodeRequest(x.to(device), Encoding(format=MXFP4, scale_rounding="up"))
        encoded = reference.encode(request)
        made = launch_triton.encode(request._replace(operand_dtype=dtype, with_counts=True))
        exponents = made.exponents
        assert torch.equal(exponents, reference.block_exponents(encoded.codes, encoded.scales)), name
        exact = reference.decode(
            DecodeRequest(encoded.codes, encoded.scales, MXFP4, *x.shape, torch.float32)
        ).double()
        for transpose in (False, True):
            packed = (encoded.codes, encoded.scales, exponents, *x.shape)
            operand = launch_fp8.decode(*packed, dtype=dtype, transpose=transpose)
            assert operand.numbers.is_contiguous()
            ours = operand.numbers.t() if transpose else operand.numbers
            check_fp8(name, ours, operand.scale, exponents, exact, encoded, dtype)
            if not transpose:
                assert torch.equal(bits(made.fp8.numbers), bits(operand.numbers)), name
                assert torch.equal(made.fp8.scale, operand.scale), name


def check_fp8(name, operand, scale, exponents, exact, encoded, dtype):
    """Blocks within reach are exact by float64, and the exponents are those of blocks with numbers."""
    reach, shift = FP8[dtype]
    rows, cols = exact.shape
    padded = torch.nn.functional.pad(exact, (0, -cols % 32)).view(rows, -1, 32)
    exponent = encoded.scales.view(torch.uint8).int()
    is_nan = exponent == 255
    is_counted = (padded.nan_to_num() != 0).any(2) & ~is_nan
    top = torch.where(is_counted, exponent, -1).amax()
    is_out = is_counted & (exponent - top < -reach)
    if is_counted.any():
        assert exponents.tolist() == [int(top), -int(exponent[is_counted].min())], name
    else:
        assert exponents.tolist() == [-256, -256], name
    expected_scale = torch.where(top < 0, 1.0, torch.exp2(top.double() - 127 - shift)).clamp_min(2.0**-126)
    assert torch.equal(scale, expected_scale.float()), (name, scale, expected_scale)
    if top >= 0 and top - shift < 1:
        return  # the scale would not be a normal number: does not fit
    is_in = (~is_out).unsqueeze(2).expand(padded.shape).reshape(rows, -1)[:, :cols]
    restored = operand.double() * expected_scale
    assert torch.equal(restored.isnan(), exact.isnan()), (name, dtype)
    is_in = is_in & ~exact.isnan()
    assert torch.equal(restored[is_in], exact[is_in]), (name, dtype)


def main():
    device, group = torch.device(sys.argv[1]), sys.argv[2]
    assert launch_triton.is_available(device)
    if group == "few":
        compare_few(device)
    elif group == "decode":
        compare_decoding(device)
    elif group == "fp8":
        compare_fp8(device)
    elif group == "loops":
        compare_with_loops(device)
    elif group == "given_maxima":
        compare_given_maxima(device)
    else:
        compare_encoding(group, device)
    print("equal")


if __name__ == "__main__":
    main()
