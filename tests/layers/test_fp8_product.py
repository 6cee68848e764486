import itertools

import numpy as np
import pytest
import torch

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.factor import ExponentRange, Factor
from megalowbit.layers.fp8_product import (
    E4M3,
    E5M2,
    decode_fp8,
    dtype_for,
    measure,
    multiply,
    scale_exponent,
)
from megalowbit.layers.gemms import multiply as multiply_bf16
from megalowbit.layers.surgery import product_counts
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
    return Factor(quantizer(name).quantize(matrix))


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


def test_one_host_read_serves_a_product_and_none_the_next(monkeypatch):
    reads = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or plain(tensor))
    layer = BitLinear(64, 32, recipe={"base": "mxfp4", "gemm": "fp8"})
    x = torch.randn(16, 64, requires_grad=True)
    output = layer(x)
    assert len(reads) == 1
    output.sum().backward()
    assert len(reads) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with FP8")
def test_accumulation_on_the_gpu_stays_close_to_fp32():
    generator = torch.Generator().manual_seed(0)
    left, right = (factor_of(torch.randn(1024, 4096, generator=generator).cuda()) for _ in range(2))
    got = multiply(left, right, transpose_left=False, transpose_right=True, out_dtype=torch.float32)
    expected = exact(left) @ exact(right).t()
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 1e-3, error
