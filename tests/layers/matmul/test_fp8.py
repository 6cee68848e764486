import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import product_counts
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.matmul.fp8 import decode_fp8, dtype_for, measure, multiply, scale_exponent
from megalowbit.layers.matmul.gemms import multiply as multiply_bf16
from megalowbit.layers.matmul.operand import ExponentRange, MatmulOperand
from megalowbit.quantize.encoding import E4M3, E5M2
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def spread_matrix(rows, cols, exponents, seed=0):
    """Every E2M1 magnitude in blocks whose scales run through the exponents given."""
    generator = np.random.default_rng(seed)
    blocks = cols // 32
    codes = generator.integers(0, 16, (rows, blocks, 32))
    codes[:, :, 0] = 7  # each block holds its largest element
    values = np.array([*GRID, *(-v for v in GRID)])[codes]
    scale = np.ldexp(1.0, np.resize(exponents, (rows, blocks, 1)))
    return torch.from_numpy((values * scale).reshape(rows, cols)).float()


def factor_of(matrix, name="mxfp4e2m1bnosr"):
    return MatmulOperand(quantizer(name).quantize(matrix))


def exact(factor):
    return factor.tensor.operand(torch.float64)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("exponents", "dtype"),
    [
        ([0], E4M3),
        ([-14, 0, -3], E4M3),
        ([100, 86], E4M3),
        ([-15, 0], E5M2),
        ([7, -21, 0], E5M2),
    ],
)
def test_operands_are_exact_up_to_the_spread_each_dtype_holds(exponents, dtype, transpose):
    matrix = spread_matrix(32, 96, exponents)
    factor = factor_of(matrix)
    measure(factor)
    assert (factor.exponents.lowest, factor.exponents.highest) == (min(exponents) + 127, max(exponents) + 127)
    assert dtype_for(factor.exponents) is dtype
    decoded = decode_fp8(factor, dtype, transpose=transpose)
    assert decoded.is_contiguous()
    value = np.ldexp(decoded.float().double().numpy(), scale_exponent(factor.exponents, dtype))
    expected = matrix.double().numpy()
    assert np.array_equal(value.T if transpose else value, expected)


def test_a_spread_of_29_fits_no_dtype():
    factor = factor_of(spread_matrix(32, 64, [0, -29]))
    measure(factor)
    assert dtype_for(factor.exponents) is None


def test_zero_and_spoiled_blocks_do_not_count_and_come_out_right():
    matrix = spread_matrix(16, 96, [0, -3, 2])
    matrix[:, 32:64] = 0.0
    matrix[3, 70] = torch.nan
    matrix[5, 33] = -0.0
    factor = factor_of(matrix)
    measure(factor)
    assert (factor.exponents.lowest, factor.exponents.highest) == (127, 129)
    decoded = decode_fp8(factor, E4M3).float()
    assert decoded[3, 64:].isnan().all()
    assert int(decoded.isnan().sum()) == 32
    assert not decoded[:, 32:64].any()


def test_a_tensor_of_zeros_and_an_empty_one_have_a_range():
    for matrix in (torch.zeros(16, 32), torch.zeros(0, 32)):
        factor = factor_of(matrix)
        measure(factor)
        assert factor.exponents == ExponentRange(lowest=127, highest=127)


@pytest.mark.parametrize("cols", [16, 33, 70, 128])
def test_padding_is_left_out(cols):
    factor = factor_of(torch.randn(5, cols, generator=torch.Generator().manual_seed(cols)))
    measure(factor)
    for transpose in (False, True):
        decoded = decode_fp8(factor, E4M3, transpose=transpose)
        value = decoded.double() * 2.0 ** scale_exponent(factor.exponents, E4M3)
        assert torch.equal(value.t() if transpose else value, exact(factor))


@pytest.mark.parametrize(
    ("transpose_left", "transpose_right"), list(itertools.product([False, True], repeat=2))
)
@pytest.mark.parametrize("right_exponents", [[0, -5], [-20, 0, 3]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_float64_up_to_accumulation(
    transpose_left, transpose_right, right_exponents, has_bias
):
    left = factor_of(spread_matrix(*((96, 32) if transpose_left else (32, 96)), [-2, 0, 5], 1))
    right = factor_of(spread_matrix(*((64, 96) if transpose_right else (96, 64)), right_exponents, 2))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(3)) if has_bias else None
    options = {"transpose_left": transpose_left, "transpose_right": transpose_right, "bias": bias}
    got = multiply(left, right, **options, out_dtype=torch.float32)
    a, b = exact(left), exact(right)
    a, b = (a.t() if transpose_left else a), (b.t() if transpose_right else b)
    expected = a @ b + (bias.double() if has_bias else 0)
    assert ((got.double() - expected).abs() <= 3e-6 * (a.abs() @ b.abs() + expected.abs())).all()
    same = multiply_bf16(
        left.tensor, right.tensor, **options, compute_dtype=torch.float32, out_dtype=torch.float32
    )
    assert ((got - same).abs() <= 3e-6 * (a.abs() @ b.abs() + expected.abs()).float()).all()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_half_precision_results_are_rounded_once(out):
    left, right = factor_of(spread_matrix(32, 64, [0, 1])), factor_of(spread_matrix(64, 32, [0, -4], 5))
    got = multiply(left, right, transpose_left=False, transpose_right=False, out_dtype=out)
    assert torch.equal(got, (exact(left) @ exact(right)).float().to(out))  # the sums are exact in fp32


def declined(left, right):
    return multiply(left, right, transpose_left=False, transpose_right=False, out_dtype=torch.float32) is None


def test_products_that_would_not_be_exact_are_declined():
    narrow, wide = spread_matrix(32, 32, [0]), spread_matrix(32, 64, [0, -20])
    assert declined(factor_of(wide.t().contiguous()[:32]), factor_of(spread_matrix(32, 64, [0, -29])))
    assert declined(factor_of(spread_matrix(64, 64, [0, -20])), factor_of(spread_matrix(64, 64, [0, -20])))
    assert declined(factor_of(narrow[:, :24]), factor_of(narrow[:24]))
    assert declined(factor_of(narrow), factor_of(narrow, "fp32"))
    assert declined(factor_of(narrow * 2.0**-100), factor_of(narrow * 2.0**-100))  # the scales' product
    assert declined(factor_of(narrow * 2.0**-122), factor_of(narrow * 2.0**100))  # one scale: 2⁻¹²⁸
    assert declined(factor_of(narrow * 2.0**100), factor_of(narrow * 2.0**-122))
    assert not declined(factor_of(narrow), factor_of(narrow))


def test_a_layer_counts_what_its_products_ran_in_and_matches_the_bf16_recipe():
    def run(gemm, size):
        torch.manual_seed(0)
        layer = BitLinear(size, 32, recipe={"base": "mxfp4", "gemm": gemm})
        layer.random_stream = RandomStream(1)
        x = torch.randn(16, size, requires_grad=True)
        output = layer(x)
        output.square().mean().backward()
        return layer, output.detach(), x.grad, layer.weight.grad, layer.bias.grad

    (layer, *got), (_, *expected) = run("fp8", 64), run("bf16", 64)
    assert product_counts(layer) == {name: {"fp8": 1} for name in ("output", "grad_input", "grad_weight")}
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())
    odd, *_ = run("fp8", 40)
    assert product_counts(odd) == {name: {"bf16": 1} for name in ("output", "grad_input", "grad_weight")}


@pytest.mark.parametrize("has_transform", [False, True])
def test_products_with_operands_of_their_own_match_the_bf16_recipe(has_transform):
    def run(gemm):
        torch.manual_seed(0)
        block = {"base": "mxfp4", "gemm": gemm, "layout": "per_gemm", "hadamard": has_transform}
        layer = BitLinear(96, 64, recipe=block)
        layer.random_stream = RandomStream(1)
        x = torch.randn(48, 96, requires_grad=True)
        output = layer(x)
        output.square().mean().backward()
        return layer, output.detach(), x.grad, layer.weight.grad, layer.bias.grad

    (layer, *got), (_, *expected) = run("fp8"), run("bf16")
    assert product_counts(layer) == {name: {"fp8": 1} for name in ("output", "grad_input", "grad_weight")}
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_a_layer_in_fp64_multiplies_in_fp64():
    torch.manual_seed(0)
    layer = BitLinear(64, 32, bias=False, dtype=torch.float64, recipe={"base": "mxfp4", "gemm": "fp8"})
    x = torch.randn(16, 64, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    expected = exact(factor_of(x)) @ exact(factor_of(layer.weight)).t()
    assert torch.allclose(output, expected, rtol=1e-13, atol=1e-13)
    output.sum().backward()
    assert product_counts(layer) == {name: {"bf16": 1} for name in ("output", "grad_input", "grad_weight")}


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_pytorch_is_asked_for_exact_sums_outside_autocast(monkeypatch, out, has_bias):
    asked = []
    plain = torch._scaled_mm

    def recording(*args, **kwargs):
        asked.append({**kwargs, "autocast": torch.is_autocast_enabled("cpu")})
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recording)
    left, right = factor_of(spread_matrix(32, 64, [0, 1])), factor_of(spread_matrix(64, 32, [0, -4], 5))
    bias = torch.ones(32) if has_bias else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        multiply(left, right, transpose_left=False, transpose_right=False, out_dtype=out, bias=bias)
    (call,) = asked
    assert call["use_fast_accum"] is False
    assert call["autocast"] is False
    assert call["scale_a"].dtype == call["scale_b"].dtype == torch.float32
    assert call["out_dtype"] == (torch.float32 if has_bias else out)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_and_device_change_nothing(default):
    def product():
        left, right = factors()
        options = {"transpose_left": False, "transpose_right": False, "bias": torch.ones(32, device="cpu")}
        return multiply(left, right, **options, out_dtype=torch.float32)

    def factors():
        return tuple(replace(each, exponents=None) for each in made)

    made = factor_of(spread_matrix(32, 64, [0, -9])), factor_of(spread_matrix(64, 32, [60, 40], 5))
    empty = factor_of(torch.zeros(0, 32))
    expected = product()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(product(), expected)
        with torch.device("meta"):
            assert torch.equal(product(), expected)
            measure(empty)
    finally:
        torch.set_default_dtype(torch.float32)
    assert empty.exponents == ExponentRange(lowest=127, highest=127)


def test_a_block_that_may_be_infinite_as_bf16_is_left_to_bf16():
    large = factor_of(torch.full((16, 32), 3.5 * 2.0**126))
    zeros = factor_of(torch.zeros(32, 16))
    assert declined(large, zeros)
    assert not declined(factor_of(torch.full((16, 32), 1.5 * 2.0**127)), zeros)
    in_bf16 = multiply_bf16(large.tensor, zeros.tensor, compute_dtype=torch.float32, out_dtype=torch.float32)
    assert in_bf16.isnan().all()
    below = factor_of(torch.full((16, 32), 3.49 * 2.0**126))
    assert exact(below).isfinite().all()


@pytest.fixture
def host_reads(monkeypatch):
    reads = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or plain(tensor))
    return reads


@pytest.mark.parametrize("layout", ["single_copy", "per_gemm"])
def test_one_host_read_serves_forward_and_one_both_products_of_backward(host_reads, layout):
    layer = BitLinear(64, 32, recipe={"base": "mxfp4", "gemm": "fp8", "layout": layout})
    x = torch.randn(16, 64, requires_grad=True)
    output = layer(x)
    assert len(host_reads) == 1
    output.sum().backward()
    assert len(host_reads) == 2


def test_the_host_reads_nothing_where_sizes_or_dtypes_decide(host_reads):
    for layer in (
        BitLinear(40, 32, recipe={"base": "mxfp4", "gemm": "fp8"}),
        BitLinear(64, 32, recipe={"base": "mxfp4", "gemm": "fp8"}, dtype=torch.float64),
        BitLinear(64, 32, recipe={"base": "bf16", "q_forward_input": "mxfp4e2m1bnosr", "gemm": "fp8"}),
    ):
        x = torch.randn(16, layer.in_features, dtype=layer.weight.dtype, requires_grad=True)
        layer(x).sum().backward()
    assert not host_reads


def test_a_device_without_fp8_is_refused_whatever_the_sizes(monkeypatch):
    monkeypatch.setattr(fp8_product, "why_unavailable", lambda device: "it is too old")
    for size in (40, 64):
        layer = BitLinear(size, 32, recipe={"base": "mxfp4", "gemm": "fp8"})
        with pytest.raises(
            UserError, match=r'gemm "fp8" cannot run on cpu: it is too old; set gemm to "bf16"'
        ):
            layer(torch.randn(16, size))


@pytest.mark.gpu
def test_accumulation_on_the_gpu_stays_close_to_fp32():
    generator = torch.Generator().manual_seed(0)
    left, right = (factor_of(torch.randn(1024, 4096, generator=generator).cuda()) for _ in range(2))
    got = multiply(left, right, transpose_left=False, transpose_right=True, out_dtype=torch.float32)
    expected = exact(left) @ exact(right).t()
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 1e-3, error
