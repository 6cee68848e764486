"""FP8 products against float64 and the bf16 path; `fp8_on_triton` does the same with Triton's kernels."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from fp8_operands import FITTING, GRADIENT, NOT_FITTING, OUTPUT, error_bound, spread_matrix
from triton_comparison import compare_in_a_process

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import product_counts
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.matmul.fp8 import fits, multiply
from megalowbit.layers.matmul.gemms import multiply as multiply_bf16
from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import DEPTH, E4M3, E5M2, NO_EXPONENT
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

PROGRAM = Path(__file__).parent / "fp8_on_triton.py"
ROOT = PROGRAM.parents[3]


def factor_of(matrix, name="mxfp4e2m1bnosr"):
    return MatmulOperand(quantizer(name).quantize(matrix, with_exponents=name.startswith("mxfp4")))


def exact(factor, *, transpose=False):
    matrix = factor.tensor.operand(torch.float64)
    return matrix.t() if transpose else matrix


def decoded(factor, dtype, *, transpose=False):
    tensor = factor.tensor
    packed = (tensor.codes, tensor.scales, tensor.exponents, *tensor.shape)
    return backends.decode_fp8(*packed, dtype=dtype, transpose=transpose)


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
    assert factor.tensor.exponents.tolist() == [max(exponents) + 127, -min(exponents) - 127]
    assert max(exponents) - min(exponents) <= DEPTH[dtype]
    operand = decoded(factor, dtype, transpose=transpose)
    assert operand.numbers.is_contiguous()
    value = operand.numbers.double().numpy() * operand.scale.double().numpy()
    expected = matrix.double().numpy()
    assert np.array_equal(value.T if transpose else value, expected)


def test_zero_and_spoiled_blocks_do_not_count_and_come_out_right():
    matrix = spread_matrix(16, 96, [0, -3, 2])
    matrix[:, 32:64] = 0.0
    matrix[3, 70] = torch.nan
    matrix[5, 33] = -0.0
    factor = factor_of(matrix)
    assert factor.tensor.exponents.tolist() == [129, -127]
    numbers = decoded(factor, E4M3).numbers.float()
    assert numbers[3, 64:].isnan().all()
    assert int(numbers.isnan().sum()) == 32
    assert not numbers[:, 32:64].any()


def test_a_tensor_of_zeros_and_an_empty_one_have_no_exponents_and_fit():
    other = factor_of(torch.ones(16, 32)).tensor.exponents
    for matrix in (torch.zeros(16, 32), torch.zeros(0, 32)):
        exponents = factor_of(matrix).tensor.exponents
        assert exponents.tolist() == [NO_EXPONENT, NO_EXPONENT]
        assert fits(exponents, other, OUTPUT)


def test_exponents_and_fp8_are_refused_where_no_product_is_exact():
    for options in ({"with_exponents": True}, {"operand_dtype": E4M3}):
        with pytest.raises(UserError, match="has no exact FP8 operand: quantise to MXFP4, or ask for bf16"):
            quantizer("nvfp4e2m1bnosr").quantize(torch.ones(16, 32), **options)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_quantizer_makes_the_operand_that_a_decode_would(dtype):
    matrix = torch.randn(48, 70, generator=torch.Generator().manual_seed(0))
    made = quantizer("mxfp4e2m1bnosr").quantize(matrix, operand_dtype=dtype)
    again = decoded(factor_of(matrix), dtype)
    assert made.ready_operand is None  # nothing may take FP8 numbers for the operand itself
    assert torch.equal(made.fp8.numbers.view(torch.uint8), again.numbers.view(torch.uint8))
    assert torch.equal(made.fp8.scale, again.scale)
    assert MatmulOperand(made).packed().tensor.fp8 is None


@pytest.mark.parametrize("cols", [16, 33, 70, 128])
def test_padding_is_left_out(cols):
    factor = factor_of(torch.randn(5, cols, generator=torch.Generator().manual_seed(cols)))
    for transpose in (False, True):
        operand = decoded(factor, E4M3, transpose=transpose)
        value = operand.numbers.double() * operand.scale.double()
        assert torch.equal(value.t() if transpose else value, exact(factor))


@pytest.mark.parametrize(
    ("transpose_left", "transpose_right"), list(itertools.product([False, True], repeat=2))
)
@pytest.mark.parametrize("left_exponents", [[0, -5], [-20, 0, 3]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_float64_up_to_accumulation(
    transpose_left, transpose_right, left_exponents, has_bias
):
    left = factor_of(spread_matrix(*((96, 32) if transpose_left else (32, 96)), left_exponents, 1))
    right = factor_of(spread_matrix(*((64, 96) if transpose_right else (96, 64)), [-2, 0, 5], 2))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(3)) if has_bias else None
    options = {"transpose_left": transpose_left, "transpose_right": transpose_right, "bias": bias}
    got = multiply(left, right, dtypes=GRADIENT, **options, out_dtype=torch.float32)
    a, b = exact(left, transpose=transpose_left), exact(right, transpose=transpose_right)
    expected = a @ b + (bias.double() if has_bias else 0)
    assert ((got.double() - expected).abs() <= 3e-6 * (a.abs() @ b.abs() + expected.abs())).all()
    same = multiply_bf16(
        left.tensor, right.tensor, **options, compute_dtype=torch.float32, out_dtype=torch.float32
    )
    assert ((got - same).abs() <= 3e-6 * (a.abs() @ b.abs() + expected.abs()).float()).all()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_half_precision_results_are_rounded_once(out):
    left, right = factor_of(spread_matrix(32, 64, [0, 1])), factor_of(spread_matrix(64, 32, [0, -4], 5))
    options = {"transpose_left": False, "transpose_right": False, "out_dtype": out}
    got = multiply(left, right, dtypes=OUTPUT, **options)
    assert torch.equal(got, (exact(left) @ exact(right)).float().to(out))  # the sums are exact in fp32


def declined(left, right, dtypes=OUTPUT):
    options = {"transpose_left": False, "transpose_right": False, "out_dtype": torch.float32}
    return multiply(left, right, dtypes=dtypes, **options) is None


@pytest.mark.parametrize("name", NOT_FITTING)
def test_products_that_would_not_be_exact_are_declined(name):
    left, right, dtypes = NOT_FITTING[name]
    assert declined(factor_of(spread_matrix(32, 64, left)), factor_of(spread_matrix(64, 32, right)), dtypes)


@pytest.mark.parametrize("name", FITTING)
def test_products_at_the_limits_are_exact(name):
    a, b, dtypes = FITTING[name]
    left, right = factor_of(spread_matrix(32, 64, a)), factor_of(spread_matrix(64, 32, b))
    options = {"transpose_left": False, "transpose_right": False, "out_dtype": torch.float32}
    expected, bound = error_bound(exact(left), exact(right), torch.float32)
    assert ((multiply(left, right, dtypes=dtypes, **options).double() - expected).abs() <= bound).all()


def test_other_sizes_and_formats_are_declined():
    narrow = spread_matrix(32, 32, [0])
    assert declined(factor_of(narrow[:, :24]), factor_of(narrow[:24]))
    assert declined(factor_of(narrow), factor_of(narrow, "fp32"))
    assert declined(factor_of(narrow, "fp32"), factor_of(narrow))
    assert not declined(factor_of(narrow), factor_of(narrow))


def test_exponents_that_were_not_asked_for_are_found():
    tensor = quantizer("mxfp4e2m1bnosr").quantize(spread_matrix(32, 64, [0, -15]))
    assert tensor.exponents is None
    assert declined(MatmulOperand(tensor), factor_of(spread_matrix(64, 32, [0])))
    assert not declined(MatmulOperand(tensor), factor_of(spread_matrix(64, 32, [0])), GRADIENT)


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
        options = {"transpose_left": False, "transpose_right": False, "out_dtype": out, "bias": bias}
        multiply(left, right, dtypes=OUTPUT, **options)
    (call,) = asked
    assert call["use_fast_accum"] is False
    assert call["autocast"] is False
    assert call["scale_a"].dtype == call["scale_b"].dtype == torch.float32
    assert call["out_dtype"] == (torch.float32 if has_bias else out)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_and_device_change_nothing(default):
    def product():
        left, right = (factor_of(each) for each in matrices)
        options = {"transpose_left": False, "transpose_right": False, "bias": torch.ones(32, device="cpu")}
        return multiply(left, right, dtypes=GRADIENT, **options, out_dtype=torch.float32)

    matrices = spread_matrix(32, 64, [0, -19]), spread_matrix(64, 32, [60, 50], 5)
    nothing = torch.zeros(0, 32)
    expected = product()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(product(), expected)
        with torch.device("meta"):
            assert torch.equal(product(), expected)
            empty = factor_of(nothing)
    finally:
        torch.set_default_dtype(torch.float32)
    assert empty.tensor.exponents.tolist() == [NO_EXPONENT, NO_EXPONENT]


def test_a_block_that_may_be_infinite_as_bf16_is_left_to_bf16():
    large = factor_of(torch.full((16, 32), 3.5 * 2.0**126))
    zeros = factor_of(torch.zeros(32, 16))
    assert declined(large, zeros)
    assert not declined(factor_of(torch.full((16, 32), 1.5 * 2.0**127)), zeros)
    in_bf16 = multiply_bf16(large.tensor, zeros.tensor, compute_dtype=torch.float32, out_dtype=torch.float32)
    assert in_bf16.isnan().all()
    below = factor_of(torch.full((16, 32), 3.49 * 2.0**126))
    assert exact(below).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("group", ["layer", "layers", "ways"])
def test_triton_kernels_replace_products_that_do_not_fit_without_a_host_read(group):
    pytest.importorskip("triton", reason="Triton is not installed")
    folders = [ROOT, ROOT / "tests" / "layers", ROOT / "tests" / "quantize"]
    environment = {"TRITON_INTERPRET": "1", "MEGALOWBIT_BACKEND": "triton"}
    path = ":".join(map(str, folders))
    compare_in_a_process("cpu", group, str(PROGRAM), **environment, PYTHONPATH=path)


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
    options = {"transpose_left": False, "transpose_right": True, "out_dtype": torch.float32}
    got = multiply(left, right, dtypes=OUTPUT, **options)
    expected = exact(left) @ exact(right).t()
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 1e-3, error
