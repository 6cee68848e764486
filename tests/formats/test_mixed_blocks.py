import math

import mixed_reference as book
import numpy as np
import pytest
import torch
from fp4_reference import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MIXED_INT8, BlockFormat
from megalowbit.formats.element import INT8, INT8_E5M2
from megalowbit.formats.mixed_blocks import THRESHOLD, mixed_values
from megalowbit.quantize import reference
from megalowbit.quantize.encoding import COUNT_NAMES, EncodeRequest
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.packed_file import load_quantized, save_quantized
from megalowbit.quantize.philox import RandomKey

KEY = RandomKey(0xFEDCBA9876543210, 2**40 + 3)
NAMES = ("int8e5m2b", "int8e5m2b:sr", "int8e5m2b:block32", "int8e5m2b:block32:unbiased")
SHAPES = ((1, 1), (3, 17), (2, 129), (3, 300), (1, 256))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def with_outliers(rows, cols, *, ratio, seed=0, size=128):
    """Gaussian blocks, each with one element of `ratio` standard deviations at a random place."""
    x = torch.randn(rows, cols, generator=seeded(seed))
    for start in range(0, cols, size):
        place = torch.randint(start, min(start + size, cols), (rows, 1), generator=seeded(seed + start))
        x.scatter_(1, place, ratio)
    return x


def inputs(shape):
    """Gaussian, heavy-tailed, constant, tiny, huge, other dtypes, sparse with negative zeros, damaged."""
    x = torch.randn(shape, generator=seeded(sum(shape)))
    tails = x * torch.randn(shape, generator=seeded(1)).mul(2).exp()
    yield from (x, tails, tails**3, torch.zeros(shape), torch.full(shape, -0.0), torch.full(shape, 7.7))
    for factor in (1e-35, 1e-37, 1e-39, 1e-43, 2e-45, 1e38):
        yield x.clamp(-3.2, 3.2) * factor
        yield (tails / tails.abs().max() * 3.2) * factor
    yield from (tails.double() * 1.2345678901, tails.bfloat16(), tails.clamp(-6e4, 6e4).half())
    yield torch.full(shape, torch.finfo(torch.float32).max)
    sparse = tails.clone()
    sparse.view(-1)[::2] = 0.0
    sparse.view(-1)[::4] = -0.0
    yield sparse
    for bad in (math.inf, -math.inf, math.nan):
        damaged = tails.clone()
        damaged.view(-1)[x.numel() // 2] = bad
        yield damaged


def check(x, name):
    """Compare codes, scales and operand with the book; returns what the quantizer made."""
    encoding, (rows, cols) = quantizer(name).encoding, x.shape
    size = encoding.format.block[1]
    got = reference.encode(EncodeRequest(x, encoding, random_key=KEY, operand_dtype=torch.float32))
    wide = x.double() if x.dtype == torch.float64 else x.float()
    random = drawn(*encoding.format.padded(rows, cols), KEY) if encoding.is_stochastic else None
    scales, codes, may_differ = book.encoded(wide.numpy(), size, random)
    assert got.tensor_scale is None
    assert got.scales.dtype == torch.float32
    assert np.array_equal(got.scales.numpy(), scales, equal_nan=True)
    assert np.array_equal(torch.signbit(got.scales).numpy(), np.signbit(scales))
    found = got.codes.numpy()
    assert np.array_equal(found[~may_differ], codes[~may_differ])
    assert (np.abs(found.astype(int) - codes.astype(int)) <= 1).all()
    with np.errstate(over="ignore"):
        expected = book.decoded(scales, found, size, cols).astype(np.float32)
    assert np.array_equal(got.operand.numpy(), expected, equal_nan=True)
    is_number = ~np.isnan(expected)
    assert np.array_equal(np.signbit(got.operand.numpy())[is_number], np.signbit(expected)[is_number])
    return got


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(shape, name, marks=() if (place + other) % 2 == 0 else pytest.mark.slow)
        for place, shape in enumerate(SHAPES)
        for other, name in enumerate(NAMES)
    ],
)
def test_scales_codes_and_values_are_those_by_the_book(name, shape):
    for x in inputs(shape):
        check(x, name)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(NAMES),
)
def test_any_numbers_equal_the_book_and_stay_within_one_step(numbers, name):
    x = torch.tensor([numbers], dtype=torch.float32)
    got = check(x, name)
    encoding = quantizer(name).encoding
    scale = got.scales.abs().repeat_interleave(encoding.format.block[1], 1)[:, : x.shape[1]].double()
    is_e5m2 = torch.signbit(got.scales).repeat_interleave(encoding.format.block[1], 1)[:, : x.shape[1]]
    relative = (x.double().abs() * 2.0**-2).maximum(scale * 2.0**-16)  # E5M2's gap, up to its subnormals
    gap = torch.where(is_e5m2, relative, scale) * (1 if encoding.is_stochastic else 0.5) * (1 + 1e-6)
    error = (quantizer(name).quantize(x, random_key=KEY).dequantize().double() - x.double()).abs()
    is_exact = scale > 2.0**-140  # below, a scale itself is rounded
    assert (error <= gap + x.double().abs() * 2.0**-23)[is_exact].all()
    assert error.isfinite().all()


def test_the_flag_is_the_sign_of_the_scale_and_no_more():
    x = torch.zeros(5, 128)
    x[0] = torch.randn(128, generator=seeded(0))
    x[1] = x[0]
    x[1, 7] = 500.0
    x[3] = x[1] * 1e-37  # E5M2's scale would be subnormal
    x[4, 3] = math.nan
    scales = quantizer("int8e5m2b").quantize(x).scales[:, 0]
    assert torch.signbit(scales).tolist() == [False, True, False, False, False]
    assert scales[0] == x[0].abs().max() / 127
    assert scales[1] == -500 / torch.tensor(57344.0)
    assert scales[2] == 1
    assert scales[3] > 0
    assert scales[4].isnan()


def test_the_constant_of_the_rule_is_a_crossover_at_twenty_three():
    numerator, denominator = THRESHOLD
    crossover = 127 * math.sqrt(2 / math.pi) * denominator / numerator
    assert crossover == pytest.approx(23, rel=2e-3)
    assert 16256 * denominator < 2**24  # sums of a block are exact in fp32 as well


@pytest.mark.parametrize(
    ("name", "size", "margin"), [("int8e5m2b", 128, 1.2), ("int8e5m2b:block32", 32, 1.5)]
)
def test_blocks_change_format_where_an_outlier_is_twenty_three_deviations(name, size, margin):
    def share_of_e5m2(ratio):
        x = with_outliers(2000, 2 * size, ratio=ratio, seed=3, size=size)
        return torch.signbit(quantizer(name).quantize(x).scales).float().mean().item()

    assert share_of_e5m2(23 / margin) < 0.05
    assert share_of_e5m2(23 * margin) > 0.95
    assert share_of_e5m2(23) == pytest.approx(0.5, abs=0.1)


def test_the_format_chosen_is_the_one_with_the_smaller_error_of_the_others():
    """Both are tried on each block; the rule may be wrong only where they are nearly as good."""
    for ratio, is_clear in ((4, True), (15, True), (22, False), (24, False), (35, True), (200, True)):
        x = with_outliers(200, 128, ratio=float(ratio), seed=5)
        chosen = torch.signbit(quantizer("int8e5m2b").quantize(x).scales)[:, 0]
        errors = []
        for largest, code in ((127, book.int8_code), (57344, book.e5m2_code)):
            scale = x.abs().amax(1, keepdim=True) / largest
            codes = [[code(value) for value in row] for row in (x / scale).tolist()]
            values = torch.tensor([[book.number(c, largest > 127) for c in row] for row in codes]) * scale
            errors.append((values - x).square().sum(1))
        best = errors[1] < errors[0]
        if is_clear:
            assert (chosen == best).float().mean() > 0.97
        paid = torch.where(chosen, errors[1], errors[0]).sum()
        assert paid <= 1.05 * torch.minimum(*errors).sum()


def test_every_e5m2_byte_is_the_upper_byte_of_its_fp16_number():
    codes = torch.tensor([sign | code for sign in (0, 128) for code in range(124)], dtype=torch.uint8)
    values = mixed_values(codes, torch.ones(codes.shape, dtype=torch.bool))
    halves = (codes.to(torch.int16) << 8).view(torch.float16)
    assert torch.equal(values.half().view(torch.int16), halves.view(torch.int16))
    assert torch.equal(values, halves.float())
    integers = mixed_values(codes, torch.zeros(codes.shape, dtype=torch.bool))
    assert integers[:124].tolist() == list(range(124))
    assert torch.equal(integers[124:], -integers[:124])


def test_with_outliers_the_others_are_nearer_than_in_either_format_alone():
    """In dB over the elements that are no outliers; a third of the blocks have one."""
    x = torch.randn(600, 512, generator=seeded(8))
    planted = with_outliers(600, 512, ratio=150.0, seed=9)
    has_outlier = torch.rand(600, 4, generator=seeded(10)) < 1 / 3
    x = torch.where(has_outlier.repeat_interleave(128, 1), planted, x)
    bulk = x.abs() < 100

    def snr(name):
        error = (quantizer(name)(x) - x)[bulk].double().square().sum()
        return 10 * math.log10(x[bulk].double().square().sum() / error)

    mixed = snr("int8e5m2b")
    assert mixed > snr("int8") + 9
    assert mixed > 29
    assert mixed > snr("fp8e5m2b") + 3  # which has scales for 1 × 16
    assert quantizer("int8e5m2b").quantize(x).format.bits_per_element == 8.25


@pytest.mark.parametrize("ratio", [3.0, 100.0])
@pytest.mark.parametrize("name", ["int8e5m2b:sr", "int8e5m2b:unbiased"])
def test_stochastic_rounding_is_right_on_average(name, ratio):
    x = with_outliers(4, 128, ratio=ratio, seed=12)
    draws = 4000
    chosen = quantizer(name)
    result = chosen.quantize(x.repeat(draws, 1), random_key=KEY)
    error = (result.dequantize() - x.repeat(draws, 1)).double().view(draws, 4, 128)
    mean, deviation = error.mean(0), error.square().mean(0).sqrt()
    scale = result.scales[:4].abs()
    is_e5m2 = torch.signbit(result.scales[:4])
    assert is_e5m2.all() == (ratio > 23)
    gap = torch.where(is_e5m2, (x.abs() * 2.0**-2).maximum(scale * 2.0**-16), scale)
    chance = deviation / math.sqrt(draws)
    assert (mean.abs() <= 5 * chance + gap * 4 / draws + x.abs() * 2.0**-23).all()
    assert (mean.sum() / chance.square().sum().sqrt()).abs() < 4
    nearest = quantizer("int8e5m2b").quantize(x)
    assert torch.equal(result.scales, nearest.scales.repeat(draws, 1))


def test_counts_are_those_of_each_blocks_own_format():
    x = torch.randn(6, 300, generator=seeded(14))
    x[0, 5] = x[1, 200] = -90.0
    x[2, :128] = 0.0
    x[3, 4] = math.inf
    x[4] *= 1e-7
    x[4, 0] = 1e3  # E5M2 reaches down to 1e3 · 2^-32 or so
    result = quantizer("int8e5m2b").quantize(x, with_counts=True)
    counts = dict(zip(COUNT_NAMES, result.counts.tolist(), strict=True))
    values = result.dequantize()
    scale = result.scales.repeat_interleave(128, 1)[:, :300]
    largest = torch.where(torch.signbit(scale), 57344.0, 127.0) * scale.abs()
    spoiled = scale.isnan()
    assert counts == {
        "elements": 1800,
        "saturated": 0,
        "upper_half": int((x.abs() > largest / 2 * (1 + 2.0**-20))[~spoiled].sum()),
        "underflow": int(((values == 0) & (x != 0)).sum()),
        "nonfinite": 1,
        "blocks": 18,
        "saturated_scales": 0,
        "zero_blocks": 1,
    }
    assert counts["underflow"] > 100
    error = (values - x)[~spoiled].double().square().sum()
    assert result.error[0].item() == pytest.approx(error.item(), rel=1e-6)


def test_too_small_for_any_scale_is_underflow_and_no_zero_block():
    result = quantizer("int8e5m2b").quantize(torch.full((1, 128), 1e-45), with_counts=True)
    counts = dict(zip(COUNT_NAMES, result.counts.tolist(), strict=True))
    assert (counts["underflow"], counts["zero_blocks"], counts["saturated"]) == (128, 0, 0)
    assert result.scales.item() == 1
    assert torch.equal(result.dequantize(), torch.zeros(1, 128))


@pytest.mark.parametrize("name", NAMES)
def test_no_finite_element_is_clipped(name):
    for factor in (1.0, 1e-30, 1e30, 1e-37):
        x = with_outliers(50, 200, ratio=40.0, seed=16) * factor
        result = quantizer(name).quantize(x, with_counts=True)
        assert result.counts[COUNT_NAMES.index("saturated")] == 0
        largest = x.abs().amax()
        assert result.dequantize().abs().amax().item() == pytest.approx(largest.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_packing_saving_and_taking_apart_change_no_bit(tmp_path, dtype):
    x = with_outliers(6, 300, ratio=200.0, seed=18)
    x[:3] = torch.randn(3, 300, generator=seeded(19))
    x[5, 290] = math.nan
    x[4, 130] = -0.0
    whole = quantizer("int8e5m2b:sr").quantize(x.to(dtype).view(2, 3, 300))
    assert set(torch.signbit(whole.scales).flatten().tolist()) == {True, False}
    assert whole.nbytes == 6 * 384 + 4 * 18
    tensors, rest = whole.to_parts()
    assert [tensor.dtype for tensor in tensors] == [torch.uint8, torch.float32]
    save_quantized({"x": whole}, tmp_path / "x.safetensors")
    for other in (rest.from_parts(tensors), load_quantized(tmp_path / "x.safetensors")["x"]):
        assert (other.format, other.shape, other.dtype) == (MIXED_INT8, x.view(2, 3, 300).shape, dtype)
        assert torch.equal(other.codes, whole.codes)
        assert torch.equal(other.scales.view(torch.int32), whole.scales.view(torch.int32))
        assert torch.equal(other.dequantize().isnan(), whole.dequantize().isnan())
        assert torch.equal(other.dequantize().nan_to_num(), whole.dequantize().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_decoding_is_value_times_magnitude_of_the_scale_rounded_once_more(dtype):
    x = with_outliers(5, 200, ratio=60.0, seed=20)
    x[2] = 0.3
    packed = quantizer("int8e5m2b").quantize(x)
    exact = torch.from_numpy(book.decoded(packed.scales.numpy(), packed.codes.numpy(), 128, 200))
    expected = exact.to(torch.float32).to(dtype)
    assert torch.equal(packed.operand(dtype), expected)
    assert torch.equal(packed.operand(dtype, transpose=True), expected.t())
    assert torch.equal(packed.dequantize(), exact.to(torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_change_the_result(name):
    x = with_outliers(256, 260, ratio=50.0, seed=22)
    for strided in (x.t(), x[:, ::2], x[::3], x[:, 5:250], x.t()[3:, ::5]):
        one, other = (
            quantizer(name).quantize(each, random_key=KEY) for each in (strided, strided.contiguous())
        )
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("signs", [None, 0xB5A3])
def test_the_transpose_is_quantised_along_the_rows(signs):
    x = with_outliers(200, 24, ratio=50.0, seed=24)
    chosen = quantizer("int8e5m2b:sr")
    got = chosen.quantize_transposed(x, signs=signs, random_key=KEY)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 8)) if signs else x
    matrix = padded.t().contiguous() if signs is None else hadamard(padded.t().contiguous(), signs)
    expected = chosen.quantize(matrix, random_key=KEY)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales, expected.scales)


def test_a_maximum_of_the_whole_tensor_is_of_no_use_to_blocks():
    x = torch.randn(3, 200, generator=seeded(26))
    one, other = (
        quantizer("int8e5m2b").quantize(x, tensor_amax=value) for value in (None, torch.tensor(math.inf))
    )
    assert torch.equal(one.scales, other.scales)


def test_the_bits_do_not_depend_on_the_default_dtype():
    x = with_outliers(4, 200, ratio=60.0, seed=28)
    before = quantizer("int8e5m2b").quantize(x, with_counts=True)
    torch.set_default_dtype(torch.float64)
    try:
        after = reference.encode(EncodeRequest(x, quantizer("int8e5m2b").encoding, with_counts=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before.codes, after.codes)
    assert torch.equal(before.scales, after.scales)
    assert torch.equal(before.counts, after.counts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int8e5m2b:tile16", "tile16 does not fit the blocks of this format, leave it out"),
        ("int8e5m2b:floor", "floor is supported for E8M0 scales only"),
        ("int8e5m2b:4over6", "four-over-six needs NVFP4"),
        ("int8e5m2b:q_scalar=1.25", "scale from their own maximum: leave q_scalar out"),
        ("int8e5m2b:seed_compat", "seed_compat exists for"),
        ("int8e5m2", "did you mean 'int8e5m2b'"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name, message):
    with pytest.raises(UserError, match="quantizer") as caught:
        quantizer(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("element", "block", "scale"),
    [(INT8, (1, 128), "signed_fp32"), (INT8_E5M2, (1, 128), "fp32"), (INT8_E5M2, None, "signed_fp32"),
     (INT8_E5M2, (16, 16), "signed_fp32")],
)  # fmt: skip
def test_a_signed_scale_goes_with_rows_of_these_elements_only(element, block, scale):
    with pytest.raises(AssertionError):
        BlockFormat(element=element, block=block, scale=scale)
