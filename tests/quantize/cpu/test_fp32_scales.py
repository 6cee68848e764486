import math
import re

import fp4_reference
import numpy as np
import pytest
import torch
from kernel_operands import HAS_COMPILER, bits, gaussian, same_numbers, special, spoil

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MIXED_INT8, BlockFormat
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8, INT8_E5M2, TERNARY
from megalowbit.quantize import reference
from megalowbit.quantize.backends import can_encode
from megalowbit.quantize.cpu import fp32_scales as kernels_cpu_8bit
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.philox import RandomKey, random_fractions

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
KEY = RandomKey(0xFEDCBA9876543210, 2**40 + 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = {"tensor": None, "1 × 16": (1, 16), "1 × 32": (1, 32), "16 × 16": (16, 16)}
FORMATS = {
    f"{element.name}, {name}": BlockFormat(element=element, block=block, scale="fp32")
    for element in (INT8, INT4, E2M1, E3M2, E4M3, E5M2)
    for name, block in BLOCKS.items()
} | {
    "mixed, 1 × 128": MIXED_INT8,
    "mixed, 1 × 32": BlockFormat(element=INT8_E5M2, block=(1, 32), scale="signed_fp32"),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
ROUNDINGS = ({}, {"is_stochastic": True})


def in_every_rounding(names):
    """Parametrize a test by formats and roundings; all but one rounding of a format are slow."""
    return pytest.mark.parametrize(
        ("name", "rounding"),
        [
            pytest.param(
                name,
                rounding,
                id=f"{name}, {('nearest', 'stochastic')[which]}",
                marks=() if place % 2 == which else pytest.mark.slow,
            )
            for place, name in enumerate(names)
            for which, rounding in enumerate(ROUNDINGS)
        ],
    )


EVERY_FORMAT_AND_ROUNDING = in_every_rounding(FORMATS)
SIGNS = 0xB5A3


def float_grid(exponent_bits, mantissa_bits, count):
    """Magnitudes of the first codes of a small float, by its definition."""
    bias, size = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    pairs = (divmod(code, size) for code in range(count))
    return tuple((m / size + bool(e)) * 2.0 ** (max(e, 1) - bias) for e, m in pairs)


GRIDS = {
    "int8": tuple(map(float, range(128))),
    "int4": tuple(map(float, range(8))),
    "e2m1": float_grid(2, 1, 8),
    "e3m2": float_grid(3, 2, 32),
    "e4m3": float_grid(4, 3, 127),
    "e5m2": float_grid(5, 2, 124),
}


def check(x, encoding, operand_dtype=torch.bfloat16, **options):
    """Everything that comes out, against the plain torch path."""
    options = {"random_key": KEY, "operand_dtype": operand_dtype, "with_counts": True, **options}
    got, expected = (
        path.encode(EncodeRequest(x, encoding, **options)) for path in (kernels_cpu_8bit, reference)
    )
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(bits(got.scales), bits(expected.scales))
    if encoding.format.block is None:
        assert torch.equal(bits(got.tensor_scale.view(1)), bits(expected.tensor_scale.view(1)))
    else:
        assert got.tensor_scale is None
    assert got.operand.dtype == operand_dtype
    assert same_numbers(got.operand, expected.operand)
    assert torch.equal(got.counts, expected.counts)
    assert torch.allclose(got.error, expected.error, rtol=1e-6, atol=0, equal_nan=True)
    plain = kernels_cpu_8bit.encode(
        EncodeRequest(x, encoding, **{**options, "operand_dtype": None, "with_counts": False})
    )
    assert torch.equal(plain.codes, got.codes)
    assert torch.equal(bits(plain.scales), bits(got.scales))
    return got


def test_where_there_is_a_compiler_there_are_kernels():
    assert kernels_cpu_8bit.LIBRARY.why_unavailable() is None


@in_every_rounding([name for name in FORMATS if not name.startswith("mixed")])
def test_codes_scales_and_operand_are_those_of_a_calculation_by_hand(name, rounding):
    format = FORMATS[name]
    x = gaussian(17, 40, seed=3)
    x[0, 0], x[1, 1] = 9.0, -0.0
    encoding, random = Encoding(format=format, **rounding, q_scalar=0.9), None
    if encoding.is_stochastic:
        random = fp4_reference.drawn(*format.padded(17, 40), KEY)
        if format.block is None:
            random = random[:17]
    grid = GRIDS[format.element.name]
    by_hand = fp4_reference.Blocks(
        x.numpy(), grid=grid, block=format.block, scale="fp32", random=random, q_scalar=0.9
    )
    got = kernels_cpu_8bit.encode(EncodeRequest(x, encoding, random_key=KEY, operand_dtype=torch.float32))
    codes = by_hand.codes[:17]
    if 2 * by_hand.sign_code != 1 << format.element.bits:  # the reference puts the sign above the grid
        is_negative = codes >= by_hand.sign_code
        codes = codes - is_negative * by_hand.sign_code + is_negative * format.element.sign_code
    assert np.array_equal(got.codes.numpy(), fp4_reference.packed(codes, format.element.bits))
    stored = got.tensor_scale.view(1, 1) if format.block is None else got.scales
    assert np.array_equal(stored.numpy(), by_hand.stored.astype(np.float32))
    assert np.array_equal(got.operand.numpy(), by_hand.values[:17, :40])


@EVERY_FORMAT_AND_ROUNDING
def test_any_shape_and_dtype_equals_the_reference(name, rounding):
    for shape in ((1, 1), (3, 17), (33, 5), (18, 290)):
        x = gaussian(*shape, seed=sum(shape))
        for dtype, operand_dtype in zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True):
            check(x.to(dtype), Encoding(format=FORMATS[name], **rounding), operand_dtype)


@EVERY_FORMAT_AND_ROUNDING
def test_numbers_at_the_ends_of_the_range_equal_the_reference(name, rounding):
    encoding = Encoding(format=FORMATS[name], **rounding)
    for kind in ("subnormal", "tiny", "huge", "many magnitudes", "zeros", "outliers", "spoiled"):
        for dtype in (torch.float32, torch.bfloat16):
            check(special(kind, 19, 150).to(dtype), encoding, torch.float32)
        check(special(kind, 19, 150)[:, :144], encoding, signs=SIGNS)


@EVERY_FORMAT
def test_magnitudes_are_scaled_before_they_choose_a_scale(name):
    if not name.startswith("mixed"):
        for q_scalar in (0.3, 1.5, 3e38):
            check(special("outliers", 19, 150), Encoding(format=FORMATS[name], q_scalar=q_scalar))


@EVERY_FORMAT_AND_ROUNDING
def test_a_given_tensor_maximum_is_taken_as_it_is(name, rounding):
    encoding = Encoding(format=FORMATS[name], **rounding)
    for amax in (0.0, -0.0, 1e-42, 0.5, -2.0, 1e30, math.inf, math.nan):
        check(gaussian(4, 40), encoding, tensor_amax=torch.tensor(amax))


@pytest.mark.parametrize("spoiler", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("given", [None, 3.0])
def test_one_number_that_is_not_finite_spoils_a_tensor_with_one_scale(spoiler, given):
    x = gaussian(90, 300)
    x[71, 250] = spoiler
    amax = None if given is None else torch.tensor(given)
    got = check(x, Encoding(format=FORMATS["e4m3, tensor"]), tensor_amax=amax)
    assert got.tensor_scale.isnan()
    assert not got.codes.any()
    assert got.counts[[3, 4]].tolist() == [0, 1]  # underflow, not finite
    assert got.error.tolist() == [0, 0]


@pytest.mark.parametrize("element", [INT8, INT4, E2M1, E3M2, E4M3, E5M2], ids=lambda each: each.name)
def test_every_halfway_number_and_its_neighbours_are_rounded_as_on_paper(element):
    grid = np.array(GRIDS[element.name])
    middles = torch.tensor((grid[1:] + grid[:-1]) / 2, dtype=torch.float32)
    up, down = (torch.nextafter(middles, torch.full_like(middles, way)) for way in (math.inf, -math.inf))
    x = torch.cat([middles, up, down, torch.tensor(grid, dtype=torch.float32), torch.tensor([3e38])])
    x = torch.cat([x, -x]).view(1, -1)
    encoding = Encoding(format=FORMATS[f"{element.name}, tensor"])
    amax = torch.tensor(element.max)
    got = check(x, encoding, torch.float32, tensor_amax=amax)
    assert got.tensor_scale == 1
    magnitudes = x.abs().double().numpy().ravel()
    nearest = np.array([fp4_reference.nearest_code(value, list(grid)) for value in magnitudes])
    assert np.array_equal(got.operand.abs().numpy().ravel(), grid[nearest].astype(np.float32))
    assert torch.equal(torch.signbit(got.operand), torch.signbit(x))


@pytest.mark.parametrize("element", [INT8, INT4, E2M1, E3M2, E4M3, E5M2], ids=lambda each: each.name)
def test_numbers_beside_a_whole_code_are_rounded_stochastically_as_in_the_reference(element):
    """Positions are sums rounded to fp32 several times: a last bit decides whether a code goes up."""
    grid = torch.tensor(GRIDS[element.name], dtype=torch.float64)
    gap = torch.cat([grid[1:] - grid[:-1], grid[-1:] - grid[-2:-1]])
    fraction = random_fractions(17 * len(grid) * 16, KEY, torch.device("cpu")).view(17, len(grid), 256)
    # each element beside the number that its own random number raises to a whole code
    near = grid.view(-1, 1) + gap.view(-1, 1) * (1 - fraction / 2.0**24)
    steps = torch.arange(-8, 9, dtype=torch.int32).view(17, 1, 1)
    x = (near.clamp(max=element.max).float().view(torch.int32) + steps).view(torch.float32).view(-1, 256)
    encoding = Encoding(format=FORMATS[f"{element.name}, tensor"], is_stochastic=True)
    codes = check(x, encoding, tensor_amax=torch.tensor(element.max)).codes
    if element.bits == 8:  # the steps are on both sides
        codes = codes.view(17, len(grid), 256)[:, 1:-1].int()
        assert (codes[-1] > codes[0]).float().mean() > 0.9


@pytest.mark.parametrize("element", [INT8, E4M3, E5M2], ids=lambda each: each.name)
def test_stochastic_rounding_is_right_on_average(element):
    x = gaussian(8, 16, seed=4) * element.max / 4
    x = x.clamp(-element.max, element.max)
    encoding = Encoding(format=FORMATS[f"{element.name}, tensor"], is_stochastic=True)
    many = x.repeat(4096, 1)
    got = kernels_cpu_8bit.encode(
        EncodeRequest(
            many, encoding, random_key=KEY, operand_dtype=torch.float32, tensor_amax=torch.tensor(element.max)
        )
    )
    values = got.operand.double().view(4096, 8, 16)
    deviation = values.std(0) / math.sqrt(4096)
    assert ((values.mean(0) - x).abs() <= 5 * deviation + 1e-9 * element.max).all()


def test_only_what_exceeds_the_largest_element_and_its_slack_is_counted_as_clipped():
    limit = np.float32(127 * (1 + 2.0**-20))
    x = torch.ones(1, 16)
    x[0, :4] = torch.tensor([127.0, float(limit), float(np.nextafter(limit, np.float32(300))), 300.0])
    x[0, 4:6] = x[0, 1:3] / 2
    counts = check(x, Encoding(format=FORMATS["int8, tensor"]), tensor_amax=torch.tensor(127.0)).counts
    assert counts[[0, 1, 2]].tolist() == [16, 2, 5]


def test_blocks_become_e5m2_where_one_element_stands_above_the_others():
    x = gaussian(40, 300, seed=8)
    x[:20, ::128] = 60.0
    for rounding in ROUNDINGS:
        got = check(x, Encoding(format=MIXED_INT8, **rounding))
        assert torch.signbit(got.scales[:20]).all()
        assert not torch.signbit(got.scales[20:]).any()


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[place % 3]) for place, name in enumerate(FORMATS)])
def test_strides_do_not_change_the_result(name, dtype):
    x = gaussian(70, 300, seed=5, dtype=dtype)
    whole = gaussian(150, 620, seed=6, dtype=dtype)
    whole[3:143:2, 7:607:2] = x
    padded = torch.zeros(300, 77, dtype=dtype)
    padded[:, 4:74] = x.t()
    encoding = Encoding(format=FORMATS[name], is_stochastic=True)
    options = {"random_key": KEY, "with_counts": True}
    expected = kernels_cpu_8bit.encode(EncodeRequest(x, encoding, **options))
    negated = torch.complex(-x.float(), -x.float()).conj().imag
    views = [x.t().contiguous().t(), whole[3:143:2, 7:607:2], torch.cat([x, x], 1)[:, :300]]
    for view in [*views, padded[:, 4:74].t(), negated]:
        got = kernels_cpu_8bit.encode(EncodeRequest(view, encoding, **options))
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(bits(got.scales), bits(expected.scales))
        assert torch.equal(got.counts, expected.counts)
        assert torch.allclose(got.error, expected.error, rtol=1e-12)


EACH_ONCE = [{(0, False)}, {(1, True)}, {(2, False)}, {(0, True)}]  # shape and layout, by name
SEVERAL_TASKS = [
    pytest.param(
        name, shape, is_turned, marks=() if (other, is_turned) in EACH_ONCE[place] else pytest.mark.slow
    )
    for place, name in enumerate(["int8, tensor", "e4m3, 16 × 16", "e3m2, 1 × 32", "mixed, 1 × 128"])
    for other, shape in enumerate([(1030, 80), (3, 33000), (40, 513)])
    for is_turned in (False, True)
]


@pytest.mark.parametrize(("name", "shape", "is_turned"), SEVERAL_TASKS)
def test_matrices_of_several_tasks_have_one_result_for_any_number_of_threads(name, shape, is_turned):
    x = gaussian(*(shape[::-1] if is_turned else shape), seed=7, dtype=torch.bfloat16)
    x = x.t() if is_turned else x
    encoding = Encoding(format=FORMATS[name], is_stochastic=True)
    threads = torch.get_num_threads()
    results, decoded = [], []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(check(x, encoding))
            parts = results[-1].codes, results[-1].scales, FORMATS[name], *shape, torch.float32
            decoded.append(kernels_cpu_8bit.decode(DecodeRequest(*parts, transpose=True)))
    finally:
        torch.set_num_threads(threads)
    for other, other_decoded in zip(results[1:], decoded[1:], strict=True):
        assert torch.equal(other.error, results[0].error)
        assert torch.equal(bits(other_decoded), bits(decoded[0]))


@EVERY_FORMAT
def test_all_codes_decode_as_in_plain_torch(name):
    format = FORMATS[name]
    rows, cols = 50, 330
    byte_count = math.prod(format.codes_shape(rows, cols))
    codes = (torch.arange(byte_count) * 167 % 256).to(torch.uint8).view(format.codes_shape(rows, cols))
    numbers = torch.tensor([1.0, 3e-39, -2.5, 1e38, math.nan, -0.0, math.inf, 7e4, -math.nan])
    scales = numbers.repeat(rows * cols)[: math.prod(format.scales_shape(rows, cols))]
    scales = scales.view(format.scales_shape(rows, cols))
    for dtype in DTYPES:
        for transpose in (False, True):
            got, expected = (
                path.decode(DecodeRequest(codes, scales, format, rows, cols, dtype, transpose=transpose))
                for path in (kernels_cpu_8bit, reference)
            )
            assert got.is_contiguous()
            assert same_numbers(got, expected)


def test_a_nan_scale_of_any_payload_decodes_to_nan():
    payloads = torch.tensor([0x7FFFFFFF, 0x7FC00001, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    format = FORMATS["int8, 1 × 16"]
    codes = torch.ones(1, 64, dtype=torch.uint8)
    for dtype in DTYPES:
        got = kernels_cpu_8bit.decode(DecodeRequest(codes, payloads.view(1, 4), format, 1, 64, dtype))
        assert got.isnan().all()


@pytest.mark.parametrize("is_flushing", [False, True])
def test_flushing_subnormals_on_this_thread_changes_nothing(is_flushing):
    x = torch.cat([gaussian(200, 80) * 1e-39, gaussian(200, 80, seed=1)])
    formats = [FORMATS[name] for name in ("e5m2, 1 × 16", "int8, 1 × 32", "mixed, 1 × 128", "int8, tensor")]
    expected = [reference.encode(EncodeRequest(x * 1e-3, Encoding(format=each))).codes for each in formats]
    scaled = x * 1e-3
    try:
        if is_flushing and not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush")
        found = [
            kernels_cpu_8bit.encode(EncodeRequest(scaled, Encoding(format=each))).codes for each in formats
        ]
    finally:
        torch.set_flush_denormal(False)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_unsupported_inputs_are_reported_before_the_call():
    nearest = Encoding(format=FORMATS["int8, tensor"])
    assert can_encode(
        kernels_cpu_8bit,
        EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), nearest, operand_dtype=torch.float16),
    )
    assert not can_encode(kernels_cpu_8bit, EncodeRequest(torch.empty(1, 16, dtype=torch.float64), nearest))
    assert not can_encode(
        kernels_cpu_8bit,
        EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), nearest, operand_dtype=torch.float64),
    )
    mean = Encoding(format=FORMATS["int8, tensor"], scale_from="mean")
    assert not can_encode(kernels_cpu_8bit, EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), mean))
    wide = BlockFormat(element=INT8, block=(1, 256), scale="fp32")
    assert not kernels_cpu_8bit.covers(wide, torch.bfloat16)
    assert not kernels_cpu_8bit.is_for(BlockFormat(element=TERNARY, block=None, scale="fp32"))


def test_a_tensor_whose_storage_was_freed_is_refused():
    x = gaussian(40, 160)
    x.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="no memory"):
        kernels_cpu_8bit.encode(EncodeRequest(x, Encoding(format=MIXED_INT8)))


# Where a compiler might go wrong: what is changed, and the check that notices.
FAULTS = [
    ("elements.h", "0x1p23f) - 0x4B000000", "0x1p22f) - 0x4A800000", "int8, nearest"),
    ("lanes.h", "0xFF0E0D0C, 0xFF0F0E0D}", "0xFF0E0D0C, 0xFF0E0E0D}", "stochastic"),
    ("elements.h", "some < of.top; some *= 2", "some < of.top; some *= 4", "stochastic"),
    ("fp32_scales.c", "141 * (elements - 1)", "140 * elements", "mixed blocks"),
    ("fp32_scales.c", "i * PITCH + j) * 2,", "i * PITCH + (j ^ 8)) * 2,", "decoding"),
]


@pytest.mark.parametrize(
    ("name", "right", "wrong", "noticed"),
    [FAULTS[0], *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:])],
)
def test_a_library_that_computes_wrongly_is_not_used(monkeypatch, tmp_path, name, right, wrong, noticed):
    spoil(monkeypatch, tmp_path, kernels_cpu_8bit, name, right, wrong)
    library, reason = kernels_cpu_8bit.LIBRARY.load()
    assert library is None
    assert re.search(rf"fails its self-check \(.*{noticed}.*\): set CC", reason), reason
