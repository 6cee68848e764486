import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalowbit.formats.block_format import NVFP4
from megalowbit.layers.matmul.gemms import column_sums, multiply
from megalowbit.quantize.backends import BACKEND_VARIABLE
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import QuantizedTensor


@pytest.fixture(params=["the fastest", "torch"])
def backend(request, monkeypatch):
    """Each test that asks for it runs with the C kernel, where there is one, and in plain torch."""
    if request.param == "torch":
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    return request.param


NEEDS_CUDA_BUILD = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="mm of fake CUDA tensors with an output dtype"
)
POWER_OF_TWO, FP32_SCALE = "nvfp4e2m1bnosr", "nvfp4e2m1bnosr:fp32_scale"


def quantized(rows, cols, seed, *, scale=1.0, name="nvfp4e2m1bnosr", dtype=torch.float32):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * scale
    return quantizer(name).quantize(x.to(dtype))


def exact(operand):
    scale = 1.0 if operand.operand_scale is None else operand.operand_scale.double()
    return operand.operand(torch.float64) * scale


@pytest.mark.parametrize(
    ("compute", "out", "of_product", "of_result"),
    [
        (torch.float64, torch.float64, 2.0**-23, 0),  # the tensor scales' product is rounded to fp32
        (torch.float32, torch.float32, 2.0**-22, 2.0**-23),
        (torch.float16, torch.float16, 2.0**-22, 2.0**-10.99),
        (torch.bfloat16, torch.bfloat16, 2.0**-7.99, 2.0**-7.99),
        (torch.bfloat16, torch.float32, 2.0**-7.99, 2.0**-23),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", [POWER_OF_TWO, FP32_SCALE])
def test_products_equal_float64_within_the_documented_roundings(
    backend, compute, out, of_product, of_result, has_bias, name
):
    left, right = quantized(33, 70, 1, name=name), quantized(20, 70, 2, scale=0.02, name=name)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(3)) if has_bias else None
    got = multiply(left, right, transpose_right=True, compute_dtype=compute, out_dtype=out, bias=bias)
    a, b = exact(left), exact(right)
    product = a @ b.t()
    expected = product + (bias.double() if has_bias else 0)
    accumulation = 0 if compute == torch.float64 else 2e-6 * (a.abs() @ b.abs().t())
    allowance = of_product * product.abs() + of_result * expected.abs() + accumulation
    assert got.dtype == out
    assert ((got.double() - expected).abs() <= allowance).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_bf16_path_rounds_once_after_scale_and_bias(backend, has_bias):
    left, right = quantized(64, 64, 4, dtype=torch.bfloat16), quantized(64, 64, 5, dtype=torch.bfloat16)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(6)).bfloat16() if has_bias else None
    got = multiply(left, right, compute_dtype=torch.bfloat16, out_dtype=torch.bfloat16, bias=bias)
    expected = exact(left) @ exact(right) + (bias.double() if has_bias else 0)
    is_off = got != expected.bfloat16()
    assert is_off.float().mean() < 0.005  # sums next to the middle of two numbers
    assert ((got.double() - expected).abs() <= 2.0**-7.99 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_operands_that_are_not_finite_show_whatever_the_scales(backend, bad):
    x = torch.full((16, 16), 1e-30)
    small = quantizer("nvfp4e2m1bnosr").quantize(x)
    x = x.clone()
    x[3, 4] = bad
    got = multiply(
        quantizer("nvfp4e2m1bnosr").quantize(x),
        small,
        transpose_right=True,
        compute_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )
    assert not got[3].isfinite().any()
    still = multiply(small, small, compute_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
    assert torch.equal(still, torch.zeros(16, 16, dtype=torch.bfloat16))  # 1e-60 is no number of either


def test_fp16_products_do_not_overflow_before_they_are_scaled(backend):
    ones = quantizer("nvfp4e2m1bnosr").quantize(torch.full((8, 256), 0.75, dtype=torch.float16))
    got = multiply(ones, ones, transpose_right=True, compute_dtype=torch.float16, out_dtype=torch.float16)
    assert torch.equal(got, torch.full((8, 8), 144.0, dtype=torch.float16))


def test_what_does_not_fit_the_output_becomes_infinite():
    large = quantizer("nvfp4e2m1bnosr").quantize(torch.full((2, 64), 1000.0, dtype=torch.float16))
    got = multiply(large, large, transpose_right=True, compute_dtype=torch.float16, out_dtype=torch.float16)
    assert got.isinf().all()


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
def test_an_operand_that_is_not_quantised_enters_as_it_is(compute):
    left, right = quantized(9, 32, 6, dtype=compute), quantized(32, 8, 7, name="fp32", dtype=compute)
    got = multiply(left, right, compute_dtype=compute, out_dtype=compute)
    expected = exact(left) @ exact(right)
    tolerance = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5}[compute]
    assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("compute", [torch.float16, torch.float32, torch.bfloat16])
def test_autocast_does_not_reach_the_product(compute):
    left, right = quantized(16, 64, 8), quantized(64, 16, 9)
    outside = multiply(left, right, compute_dtype=compute, out_dtype=compute)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = multiply(left, right, compute_dtype=compute, out_dtype=compute)
    assert torch.equal(outside, inside)


def test_transposed_operands_are_the_same_codes():
    left, right = quantized(32, 48, 10), quantized(32, 24, 11)
    got = multiply(left, right, transpose_left=True, compute_dtype=torch.float64, out_dtype=torch.float64)
    assert torch.allclose(got, exact(left).t() @ exact(right), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_column_sums_accumulate_beyond_the_inputs_precision(backend, dtype):
    matrix = torch.ones(5000, 96, dtype=dtype)  # bf16 would stop at 256, fp16 at 2048
    assert torch.equal(column_sums(matrix, torch.float32), torch.full((96,), 5000.0))
    assert column_sums(matrix, dtype).dtype == dtype


def test_large_results_are_finished_in_pieces_without_a_seam(backend):
    left = quantized(700, 32, 12, name=FP32_SCALE, dtype=torch.bfloat16)
    right = quantized(32, 800, 13, name=FP32_SCALE, dtype=torch.bfloat16)
    bias = torch.randn(800)
    got = multiply(left, right, compute_dtype=torch.bfloat16, out_dtype=torch.bfloat16, bias=bias)
    product = torch.addmm(torch.zeros(800).bfloat16(), left.operand(), right.operand(), alpha=0.5).float()
    scale = 2 * (left.operand_scale * right.operand_scale)
    expected = exact(left) @ exact(right) + bias.double()
    assert ((got.double() - expected).abs() <= 2.0**-7.99 * (product.abs() * scale + expected.abs())).all()


@pytest.mark.parametrize(
    ("name", "out", "with_bias", "without_bias"),
    [
        (POWER_OF_TWO, torch.bfloat16, ["addmm"], ["mm"]),
        pytest.param(POWER_OF_TWO, torch.float32, ["mm", "add_"], ["mm"], marks=NEEDS_CUDA_BUILD),
        pytest.param(
            FP32_SCALE,
            torch.bfloat16,
            ["mul", "mm", "mul_", "add_", "copy_"],
            ["mul", "mm", "mul_", "copy_"],
            marks=NEEDS_CUDA_BUILD,
        ),
    ],
)
def test_kernels_of_a_product_on_a_gpu(name, out, with_bias, without_bias):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if function._schema.name.removeprefix("aten::") in {
                "mul",
                "mul_",
                "mm",
                "addmm",
                "add_",
                "copy_",
            }:
                self.names.append(function._schema.name.removeprefix("aten::"))
            return function(*arguments, **(options or {}))

    def run(bias):
        recorder = Recorder()
        recorder.names = []
        with recorder:
            multiply(left, right, compute_dtype=torch.bfloat16, out_dtype=out, bias=bias)
        return recorder.names

    with FakeTensorMode():
        cuda = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        left, right = (
            QuantizedTensor(
                codes=cuda(0),
                scales=cuda(0),
                tensor_scale=cuda((), dtype=torch.float32),
                shape=torch.Size((64, 64)),
                dtype=torch.bfloat16,
                format=NVFP4,
                is_power_of_two=quantizer(name).encoding.is_power_of_two,
                ready_operand=cuda(64, 64),
            )
            for _ in range(2)
        )
        assert run(cuda(64)) == with_bias
        assert run(None) == without_bias


def test_mismatched_shapes_are_an_error():
    with pytest.raises(RuntimeError):
        multiply(
            quantized(4, 32, 0), quantized(48, 4, 1), compute_dtype=torch.float32, out_dtype=torch.float32
        )
