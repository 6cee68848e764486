import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED
from megalowbit.quantize import kernels_cpu, reference
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.philox import RandomKey

sys.path.insert(0, str(Path(__file__).parent))
import philox_reference

pytestmark = pytest.mark.skipif(
    not kernels_cpu.is_available(), reason=f"no CPU kernel: {kernels_cpu.why_unavailable()}"
)
F = np.float32
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][
    :127
]
KEY = RandomKey(0xFEDCBA9876543210, 2**40 + 3)
ENCODINGS = {
    "nearest": Encoding(format=NVFP4),
    "scale up": Encoding(format=NVFP4, scale_rounding="up", q_scalar=0.7),
    "stochastic": Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up"),
    "headroom": Encoding(format=NVFP4, is_stochastic=True, q_scalar=1.5),
    "four over six": Encoding(format=NVFP4, four_over_six=True),
    "tiled": Encoding(format=NVFP4_TILED),
    "tiled stochastic": Encoding(format=NVFP4_TILED, is_stochastic=True),
    "mx down": Encoding(format=MXFP4, scale_rounding="down"),
    "mx up": Encoding(format=MXFP4, scale_rounding="up", is_stochastic=True, q_scalar=1.25),
}
EVERY_ENCODING = pytest.mark.parametrize("name", ENCODINGS)
SIGNS = 0xB5A3


def nearest_e4m3(value):
    return min(range(127), key=lambda code: (abs(E4M3[code] - value), code % 2))


def e4m3_code(value, is_up):
    code = nearest_e4m3(value)
    return code + 1 if is_up and E4M3[code] < value else code


def e8m0_code(a, is_up):
    if a == 0:
        return 0
    exponent = math.frexp(a)[1] - 1 - 2
    if is_up:
        exponent += 6 * 2.0**exponent < a
    return min(max(exponent, -127), 127) + 127


def transformed(row, signs):
    row = [F(-value) if signs >> j % 16 & 1 else value for j, value in enumerate(row)]
    for half in (1, 2, 4, 8):
        for i in range(len(row)):
            if not i & half:
                row[i], row[i + half] = F(row[i] + row[i + half]), F(row[i] - row[i + half])
    return [F(value * F(0.25)) for value in row]


def element_codes(y, random):
    """Codes of fp32 numbers; `random` holds a byte for each, or is None."""
    magnitude = np.minimum(np.abs(y), F(6))
    if random is None:
        distance = np.abs(GRID - magnitude.astype(np.float64)[..., None]) * 2
        codes = (distance + (np.arange(8) % 2) * 1e-9).argmin(-1)  # 2⁻²⁴ · 0.25 is over 1e-9: only ties move
    else:
        position = np.minimum(np.minimum(magnitude + magnitude, magnitude + F(2)), magnitude * F(0.5) + F(4))
        codes = np.minimum(np.floor(position + (random + F(0.5)) / F(256)), 7).astype(int)
    return codes + 8 * np.signbit(y)


class Blocks:
    """One block after the other, from the text of the numerics; shares no code with the package."""

    def __init__(self, x, encoding, signs=None, tensor_amax=None):
        self.encoding, self.format = encoding, encoding.format
        self.rows, self.cols = x.shape
        height, width = self.format.block
        padded = (-(-self.rows // height) * height, -(-self.cols // width) * width)
        self.x = np.zeros(padded, F)
        self.x[: self.rows, : self.cols] = x
        if signs is not None:
            end = -(-self.cols // 16) * 16
            for row in range(self.rows):
                for col in range(0, end, 16):
                    self.x[row, col : col + 16] = transformed(self.x[row, col : col + 16], signs)
        self.shape = padded[0] // height, padded[1] // width
        self.amax = np.array(
            [[self._amax(self._block(i, j)) for j in range(self.shape[1])] for i in range(self.shape[0])]
        )
        finite = self.amax[np.isfinite(self.amax)]
        largest = F(finite.max() if finite.size else 0) if tensor_amax is None else F(tensor_amax)
        top = F(256 * 6 if encoding.four_over_six else 448 * 6)
        self.S = F(min(top / largest, F(2.0**126))) if largest > 0 else F(1)
        self.codes, self.values = np.zeros(padded, int), np.zeros(padded, F)
        self.scaled, self.scales = np.zeros(padded, F), np.zeros(self.shape, np.uint8)
        self.overflows = 0
        for i in range(self.shape[0]):
            for j in range(self.shape[1]):
                self._encode(i, j)

    def _slices(self, i, j):
        height, width = self.format.block
        return slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)

    def _block(self, i, j):
        return self.x[self._slices(i, j)]

    def _amax(self, block):
        a = F(np.abs(block).max() * F(self.encoding.q_scalar)) if np.isfinite(block).all() else F(np.nan)
        return a if np.isfinite(a) else F(np.nan)

    def _random(self, where):
        if not self.encoding.is_stochastic:
            return None
        groups = self.x.shape[1] // 16
        rows = range(self.x.shape[0])[where[0]]
        cols = range(groups)[where[1].start // 16 : where[1].stop // 16]
        drawn = [
            b"".join(philox_reference.random_bytes(row * groups + col, *KEY) for col in cols) for row in rows
        ]
        return np.array([list(each) for each in drawn], F)

    def _candidate(self, block, a, top, random):
        is_up = self.encoding.scale_rounding == "up"
        if self.format.scale == "e8m0":
            stored = e8m0_code(float(a), is_up)
            scale, encode, ratio = F(2.0 ** (stored - 127)), F(2.0 ** (127 - stored)), 0
        else:
            ratio = a / (F(top) / self.S)
            stored = e4m3_code(float(min(ratio, F(448))), is_up)
            scale = F(E4M3[stored])
            encode = self.S / scale if scale else F(0)
            encode = encode if np.isfinite(encode) else F(0)
        scaled = block * encode
        codes = element_codes(scaled, random)
        values = (np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7]).astype(F) * scale
        squares = ((values - block * self.S) ** 2).ravel()
        while len(squares) > 1:
            squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
        return squares[0], stored, codes, values, scaled, ratio > 448 * (1 + 2.0**-20)

    def _encode(self, i, j):
        where, a = self._slices(i, j), self.amax[i, j]
        if np.isnan(a):
            self.scales[i, j] = 0x7F if self.format.scale == "e4m3" else 0xFF
            self.values[where] = self.scaled[where] = np.nan
            return
        best = self._candidate(self.x[where], a, 6, self._random(where))
        if self.encoding.four_over_six:
            other = self._candidate(self.x[where], a, 4, None)
            best = other if other[0] < best[0] else best
        _, self.scales[i, j], self.codes[where], self.values[where], self.scaled[where], overflows = best
        self.overflows += int(overflows)
        if self.encoding.format is MXFP4 and where[1].stop - self.cols >= 16:
            self.codes[where[0], -(-self.cols // 16) * 16 :] = 0

    def packed(self):
        codes = self.codes[: self.rows]
        return codes[:, ::2] + 16 * codes[:, 1::2]

    def counts(self):
        crop = slice(0, self.rows), slice(0, self.cols)
        x, values, y = self.x[crop], self.values[crop], np.abs(self.scaled[crop])
        slack = 1 + 2.0**-20
        scale_is_zero = self.scales == 0 if self.format.scale == "e4m3" else self.amax == 0
        counts = [
            x.size,
            (y > 6 * slack).sum(),
            (y > 3 * slack).sum(),
            ((x != 0) & (values == 0)).sum(),
            (~np.isfinite(x)).sum(),
            self.scales.size,
            self.overflows,
            scale_is_zero.sum(),
        ]
        decoded = values * (F(1) / self.S) if self.format.scale == "e4m3" else values
        sound = ~np.isnan(decoded)
        decoded = np.clip(decoded[sound].astype(np.float64), -np.finfo(F).max, np.finfo(F).max)
        exact = x[sound].astype(np.float64)
        return [int(count) for count in counts], [((exact - decoded) ** 2).sum(), (exact**2).sum()]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_numbers(a, b):
    """Equal bits, but for the payloads of NaN."""
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(
        bits(torch.where(is_nan, 0, a)), bits(torch.where(is_nan, 0, b))
    )


def check(x, encoding, **options):
    dtype = options.pop("operand_dtype", torch.bfloat16)
    got = kernels_cpu.encode(x, encoding, random_key=KEY, operand_dtype=dtype, with_counts=True, **options)
    amax = options.pop("tensor_amax", None)
    with np.errstate(all="ignore"):
        expected = Blocks(
            x.float().numpy(), encoding, tensor_amax=None if amax is None else amax.item(), **options
        )
        counts, error = expected.counts()
    assert np.array_equal(got.scales.view(torch.uint8).numpy(), expected.scales)
    assert np.array_equal(got.codes.numpy(), expected.packed())
    values = torch.from_numpy(expected.values[: x.shape[0], : x.shape[1]])
    assert same_numbers(got.operand.float(), values)
    assert got.operand.dtype == dtype
    if encoding.format.scale == "e4m3":
        assert torch.equal(got.tensor_scale, torch.reciprocal(torch.tensor(expected.S)))
    else:
        assert got.tensor_scale is None
    assert got.counts.tolist() == counts
    assert np.allclose(got.error.numpy(), error, rtol=1e-6, atol=0)
    for asked in (None, dtype):
        plain = kernels_cpu.encode(
            x, encoding, random_key=KEY, operand_dtype=asked, tensor_amax=amax, **options
        )
        assert torch.equal(plain.codes, got.codes)
        assert asked is None or torch.equal(bits(plain.operand), bits(got.operand))
    for out in (torch.bfloat16, torch.float32):
        decoded = kernels_cpu.decode(got.codes, got.scales, encoding.format, *x.shape, out)
        assert same_numbers(decoded.float(), values)
        turned = kernels_cpu.decode(got.codes, got.scales, encoding.format, *x.shape, out, transpose=True)
        assert turned.is_contiguous()
        assert same_numbers(turned.t().float(), values)
    return got


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special(name):
    x = gaussian(5, 100, seed=2)
    if name == "subnormal":
        return x * 1e-41
    if name == "tiny":
        return x * 2e-37
    if name == "huge":
        return (x * 1e38).clamp(-3.4e38, 3.4e38)
    if name == "many magnitudes":
        return x * torch.logspace(-44, 37, 100)
    if name == "zeros":
        return x * 0
    x[0, 3], x[1, 40], x[2, 77:] = math.inf, math.nan, -math.inf
    x[3, :32] = -0.0
    x[4, 1::2] = 1e-30
    return x


def test_the_philox_of_these_tests_gives_the_published_vectors():
    for counter, key, output in philox_reference.KNOWN_ANSWERS:
        assert philox_reference.philox(counter, key) == output


@EVERY_ENCODING
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (33, 5), (5, 100), (18, 290)], ids=str)
def test_codes_scales_operand_and_counts_equal_the_reference_on_any_shape(name, shape):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[sum(shape) % 3]
    check(gaussian(*shape, seed=sum(shape), dtype=dtype), ENCODINGS[name])


@EVERY_ENCODING
@pytest.mark.parametrize("kind", ["subnormal", "tiny", "huge", "many magnitudes", "zeros", "spoiled"])
def test_numbers_at_the_ends_of_the_range_equal_the_reference(name, kind):
    check(special(kind), ENCODINGS[name], operand_dtype=torch.float32)


@EVERY_ENCODING
@pytest.mark.parametrize("kind", ["huge", "zeros", "spoiled"])
def test_the_hadamard_transform_equals_the_reference(name, kind):
    check(special(kind)[:, :96], ENCODINGS[name], signs=SIGNS)
    check(gaussian(3, 272, dtype=torch.bfloat16), ENCODINGS[name], signs=1)


@EVERY_ENCODING
@pytest.mark.parametrize("amax", [0.0, 1e-42, 1.0, 1e30, math.inf, math.nan])
def test_a_given_tensor_maximum_is_taken_as_it_is(name, amax):
    if ENCODINGS[name].format is not MXFP4:
        check(gaussian(4, 40), ENCODINGS[name], tensor_amax=torch.tensor(amax))


def test_halfway_numbers_go_to_the_even_code():
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 448
    x[0, 16:24] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x[0, 24:] = torch.nextafter(x[0, 16:24], torch.tensor(math.inf))
    x[0, 24] = -0.0
    got = check(x, ENCODINGS["nearest"])
    assert got.operand[0, 16:].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY_ENCODING
def test_strides_do_not_change_the_result(name, dtype):
    x = gaussian(70, 300, seed=5, dtype=dtype)
    whole = gaussian(150, 620, seed=6, dtype=dtype)
    whole[3:143:2, 7:607:2] = x
    views = [x.t().contiguous().t(), whole[3:143:2, 7:607:2], torch.cat([x, x], 1)[:, :300]]
    padded = torch.zeros(300, 77, dtype=dtype)
    padded[:, 4:74] = x.t()
    expected = kernels_cpu.encode(x, ENCODINGS[name], random_key=KEY, signs=SIGNS, with_counts=True)
    for view in [*views, padded[:, 4:74].t()]:
        got = kernels_cpu.encode(view, ENCODINGS[name], random_key=KEY, signs=SIGNS, with_counts=True)
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(bits(got.scales), bits(expected.scales))
        assert torch.equal(got.counts, expected.counts)
        assert torch.allclose(got.error, expected.error, rtol=1e-12)
    column = x[:, :1]
    assert torch.equal(
        kernels_cpu.encode(column, ENCODINGS[name]).codes,
        kernels_cpu.encode(column.clone(), ENCODINGS[name]).codes,
    )


@EVERY_ENCODING
@pytest.mark.parametrize("shape", [(1030, 80), (3, 33000), (40, 513)], ids=str)
@pytest.mark.parametrize("is_turned", [False, True])
def test_matrices_of_several_tasks_equal_the_plain_torch_path_for_any_number_of_threads(
    name, shape, is_turned
):
    x = gaussian(*(shape[::-1] if is_turned else shape), seed=7, dtype=torch.bfloat16)
    x = x.t() if is_turned else x
    options = {"random_key": KEY, "operand_dtype": torch.bfloat16, "with_counts": True}
    expected = reference.encode(x, ENCODINGS[name], **options)
    threads = torch.get_num_threads()
    errors = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = kernels_cpu.encode(x, ENCODINGS[name], **options)
            errors.append(got.error)
            assert torch.equal(got.codes, expected.codes)
            assert torch.equal(bits(got.scales), bits(expected.scales))
            assert torch.equal(bits(got.operand), bits(expected.operand))
            assert torch.equal(got.counts, expected.counts)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(errors[0], errors[1])
    assert torch.equal(errors[0], errors[2])
    assert torch.allclose(errors[0], expected.error, rtol=1e-6)


@pytest.mark.parametrize(
    "key", [RandomKey(0), RandomKey(1), RandomKey(2**32), RandomKey(0, 1), RandomKey(0, 2**32)]
)
def test_every_bit_of_key_and_step_matters(key):
    x = gaussian(8, 64)
    encoding = ENCODINGS["stochastic"]
    codes = kernels_cpu.encode(x, encoding, random_key=key).codes
    assert torch.equal(codes, reference.encode(x, encoding, random_key=key).codes)
    assert not torch.equal(codes, kernels_cpu.encode(x, encoding, random_key=RandomKey(5)).codes)


def test_all_bytes_of_scales_and_codes_decode_as_in_plain_torch():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale_bytes = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 32)
    for format, dtype in ((NVFP4, torch.float8_e4m3fn), (MXFP4, torch.float8_e8m0fnu)):
        scales = scale_bytes[:, : 512 // format.block[1]].contiguous().view(dtype)
        got = kernels_cpu.decode(codes, scales, format, 256, 512, torch.float32)
        assert same_numbers(got, reference.decode(codes, scales, format, 256, 512, torch.float32))


def test_what_is_not_covered_is_said_beforehand():
    nearest = ENCODINGS["nearest"]
    assert kernels_cpu.supports(torch.bfloat16, nearest, torch.float32)
    assert not kernels_cpu.supports(torch.float64, nearest, None)
    assert not kernels_cpu.supports(torch.bfloat16, nearest, torch.float16)
    assert not kernels_cpu.supports(torch.bfloat16, Encoding(format=NVFP4, scale_from="mean"), None)
