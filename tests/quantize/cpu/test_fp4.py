import math

import fp4_reference
import numpy as np
import philox_reference
import pytest
import torch
from kernel_operands import HAS_COMPILER, bits, gaussian, same_numbers, special

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED
from megalowbit.quantize import reference
from megalowbit.quantize.backends import can_encode
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
KEY = RandomKey(0xFEDCBA9876543210, 2**40 + 3)
ENCODINGS = {
    "nearest": Encoding(format=NVFP4),
    "scale up": Encoding(format=NVFP4, scale_rounding="up", q_scalar=0.7),
    "stochastic": Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up"),
    "unbiased": quantizer("nvfp4e2m1b:unbiased").encoding,
    "mx unbiased": quantizer("mxfp4e2m1b:unbiased").encoding,
    "headroom": Encoding(format=NVFP4, is_stochastic=True, q_scalar=1.5),
    "four over six": Encoding(format=NVFP4, four_over_six=True),
    "power of two": Encoding(format=NVFP4, is_power_of_two=True),
    "tiled": Encoding(format=NVFP4_TILED),
    "tiled stochastic": Encoding(format=NVFP4_TILED, is_stochastic=True),
    "mx down": Encoding(format=MXFP4, scale_rounding="down"),
    "mx up": Encoding(format=MXFP4, scale_rounding="up", is_stochastic=True, q_scalar=1.25),
}
EVERY_ENCODING = pytest.mark.parametrize("name", ENCODINGS)
SIGNS = 0xB5A3


def check(x, encoding, **options):
    dtype = options.pop("operand_dtype", torch.bfloat16)
    got = kernels_cpu.encode(
        EncodeRequest(x, encoding, random_key=KEY, operand_dtype=dtype, with_counts=True, **options)
    )
    amax = options.pop("tensor_amax", None)
    expected = fp4_reference.encoded(
        x.float().numpy(), encoding, KEY, tensor_amax=None if amax is None else amax.item(), **options
    )
    counts, error = expected.counts()
    assert np.array_equal(got.scales.view(torch.uint8).numpy(), expected.stored)
    assert np.array_equal(got.codes.numpy(), fp4_reference.packed(expected.codes[: x.shape[0]], 4))
    values = torch.from_numpy(expected.operand[: x.shape[0], : x.shape[1]])
    scale = got.tensor_scale if encoding.is_power_of_two else None
    assert same_numbers(got.operand.float(), values)
    assert got.operand.dtype == dtype
    if encoding.format.scale == "e4m3":
        assert got.tensor_scale.item() == expected.tensor_scale
    else:
        assert got.tensor_scale is None
    assert got.counts.tolist() == counts
    assert np.allclose(got.error.numpy(), error, rtol=1e-6, atol=0)
    for asked in (None, dtype):
        plain = kernels_cpu.encode(
            EncodeRequest(x, encoding, random_key=KEY, operand_dtype=asked, tensor_amax=amax, **options)
        )
        assert torch.equal(plain.codes, got.codes)
        assert asked is None or torch.equal(bits(plain.operand), bits(got.operand))
    for out in (torch.bfloat16, torch.float32):
        parts = got.codes, got.scales, encoding.format, *x.shape, out
        decoded = kernels_cpu.decode(DecodeRequest(*parts, tensor_scale=scale))
        assert same_numbers(decoded.float(), values)
        turned = kernels_cpu.decode(DecodeRequest(*parts, transpose=True, tensor_scale=scale))
        assert turned.is_contiguous()
        assert same_numbers(turned.t().float(), values)
    return got


def test_where_there_is_a_compiler_there_are_kernels():
    assert kernels_cpu.LIBRARY.why_unavailable() is None


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
    check(special(kind, 5, 100), ENCODINGS[name], operand_dtype=torch.float32)


@EVERY_ENCODING
@pytest.mark.parametrize("kind", ["huge", "zeros", "spoiled"])
def test_the_hadamard_transform_equals_the_reference(name, kind):
    check(special(kind, 5, 100)[:, :96], ENCODINGS[name], signs=SIGNS)
    check(gaussian(3, 272, dtype=torch.bfloat16), ENCODINGS[name], signs=1)


@EVERY_ENCODING
@pytest.mark.parametrize("amax", [0.0, 1e-42, 1.0, 1e30])
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
    expected = kernels_cpu.encode(
        EncodeRequest(x, ENCODINGS[name], random_key=KEY, signs=SIGNS, with_counts=True)
    )
    for view in [*views, padded[:, 4:74].t()]:
        got = kernels_cpu.encode(
            EncodeRequest(view, ENCODINGS[name], random_key=KEY, signs=SIGNS, with_counts=True)
        )
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(bits(got.scales), bits(expected.scales))
        assert torch.equal(got.counts, expected.counts)
        assert torch.allclose(got.error, expected.error, rtol=1e-12)
    column = x[:, :1]
    assert torch.equal(
        kernels_cpu.encode(EncodeRequest(column, ENCODINGS[name])).codes,
        kernels_cpu.encode(EncodeRequest(column.clone(), ENCODINGS[name])).codes,
    )


def test_a_view_that_only_says_it_is_negated_is_negated():
    x = gaussian(20, 64)
    view = torch.complex(x, x).conj().imag
    assert view.is_neg()
    encoding = ENCODINGS["nearest"]
    assert torch.equal(
        kernels_cpu.encode(EncodeRequest(view, encoding)).codes,
        kernels_cpu.encode(EncodeRequest(-x, encoding)).codes,
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
    expected = reference.encode(EncodeRequest(x, ENCODINGS[name], **options))
    threads = torch.get_num_threads()
    errors = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = kernels_cpu.encode(EncodeRequest(x, ENCODINGS[name], **options))
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
    codes = kernels_cpu.encode(EncodeRequest(x, encoding, random_key=key)).codes
    assert torch.equal(codes, reference.encode(EncodeRequest(x, encoding, random_key=key)).codes)
    assert not torch.equal(
        codes, kernels_cpu.encode(EncodeRequest(x, encoding, random_key=RandomKey(5))).codes
    )


def test_all_bytes_of_scales_and_codes_decode_as_in_plain_torch():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale_bytes = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 32)
    for format, dtype in ((NVFP4, torch.float8_e4m3fn), (MXFP4, torch.float8_e8m0fnu)):
        scales = scale_bytes[:, : 512 // format.block[1]].contiguous().view(dtype)
        got = kernels_cpu.decode(DecodeRequest(codes, scales, format, 256, 512, torch.float32))
        assert same_numbers(
            got, reference.decode(DecodeRequest(codes, scales, format, 256, 512, torch.float32))
        )


def test_unsupported_inputs_are_reported_before_the_call():
    nearest = ENCODINGS["nearest"]
    assert can_encode(
        kernels_cpu,
        EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), nearest, operand_dtype=torch.float32),
    )
    assert not can_encode(kernels_cpu, EncodeRequest(torch.empty(1, 16, dtype=torch.float64), nearest))
    assert not can_encode(
        kernels_cpu,
        EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), nearest, operand_dtype=torch.float16),
    )
    assert not can_encode(
        kernels_cpu,
        EncodeRequest(torch.empty(1, 16, dtype=torch.bfloat16), Encoding(format=NVFP4, scale_from="mean")),
    )


def test_flushing_subnormals_on_one_thread_changes_nothing():
    x = torch.cat([gaussian(200, 80) * 1e-39, gaussian(200, 80, seed=1)])
    threads = torch.get_num_threads()
    encodings = [ENCODINGS[name] for name in ENCODINGS]
    expected = [kernels_cpu.encode(EncodeRequest(x, each, operand_dtype=torch.float32)) for each in encodings]
    sums = kernels_cpu.column_sums(x[:200])
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            if not torch.set_flush_denormal(True):
                pytest.skip("this machine cannot flush")
            found = [
                kernels_cpu.encode(EncodeRequest(x, each, operand_dtype=torch.float32)) for each in encodings
            ]
            found_sums = kernels_cpu.column_sums(x[:200])
            is_flushing = (torch.full((), 1e-39) * torch.ones(())).item() == 0
            torch.set_flush_denormal(False)
            assert is_flushing  # the thread's own choice is put back
            assert torch.equal(bits(found_sums), bits(sums))
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours.codes, theirs.codes)
                assert torch.equal(bits(ours.operand), bits(theirs.operand))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@EVERY_ENCODING
@pytest.mark.parametrize("amax", [math.inf, -math.inf, math.nan])
def test_a_given_maximum_that_is_not_finite_spoils_every_block(name, amax):
    x = gaussian(18, 70)
    x[0, 0], x[1] = math.nan, 0
    if ENCODINGS[name].format is not MXFP4:
        options = {"random_key": KEY, "tensor_amax": torch.tensor(amax), "operand_dtype": torch.float32}
        ours, theirs = (
            path.encode(EncodeRequest(x, ENCODINGS[name], with_counts=True, **options))
            for path in (kernels_cpu, reference)
        )
        for encoded in (ours, theirs):
            assert encoded.operand.isnan().all()
            assert encoded.tensor_scale.isnan()
            assert not encoded.codes.any()
            assert (encoded.scales.view(torch.uint8) == 0x7F).all()
        assert torch.equal(ours.counts, theirs.counts)
        assert torch.equal(ours.error, theirs.error)


def test_a_tensor_whose_storage_was_freed_is_refused():
    x = gaussian(40, 160)
    x.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="no memory"):
        kernels_cpu.encode(EncodeRequest(x, Encoding(format=NVFP4)))
