"""FP8 products where Triton's kernels decide whether they fit: `python fp8_on_triton.py cpu layer`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import itertools
import sys
from unittest import mock

import pytest
import torch
from host_reads import HostReads
from test_fp8 import EVERY_SHIFT, FITTING, NOT_FITTING, error_bound, exact, factor_of, spread_matrix

from benchmarks.kernels import launches
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.matmul.fp8 import DTYPES, fits, multiply
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import E4M3, E5M2
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments, launch_fp8

FORWARD = ["fp4.encode_kernel", "fp8.decode_kernel"] * 2 + ["fp8.product_kernel"]
TRANSPOSED = ["fp8.decode_kernel", "fp8.product_kernel"]
BACKWARD = {
    "single_copy": [
        *("fp4.encode_kernel", "fp8.decode_kernel", *TRANSPOSED),  # grad_output, and weight transposed
        *("fp8.decode_kernel", *TRANSPOSED),  # grad_output and input, transposed
    ],
    "per_gemm": [
        *("fp4.encode_kernel", "fp8.decode_kernel", "fp4.encode_kernel"),  # grad_output and its transpose
        *TRANSPOSED,
        *("fp8.decode_kernel", *TRANSPOSED),
    ],
}


def made(gemm, layout, weight):
    layer = BitLinear(64, 32, bias=False, recipe={"base": "mxfp4", "gemm": gemm, "layout": layout})
    layer.random_stream = RandomStream(1)
    layer.random_stream.check(torch.device("cpu"))  # launches kernels at its first use
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def trained(layer, x, grad):
    x, layer.weight.grad = x.clone().requires_grad_(), None
    output = layer(x)
    output.backward(grad)
    return output.detach(), x.grad, layer.weight.grad


def check_layer(*layouts):
    """Bits of the bf16 recipe, no host read, and the launches that there have to be."""
    x, weight, grad = tensors()
    for layout in layouts:
        expected, layer = trained(made("bf16", layout, weight), x, grad), made("fp8", layout, weight)
        launched, launch = [], launch_arguments.launch

        def noted(kernel, *arguments, launched=launched, launch=launch, **named):
            launched.append(launches.name_of(kernel))
            launch(kernel, *arguments, **named)

        with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads, launches.launching(noted):
            got = trained(layer, x, grad)
        # the random stream, on the host, is made and checked here
        assert not {place for place in reads.places if "random_stream" not in place}, reads.places
        own = ["fp4.encode_kernel"] * 2 if layout == "per_gemm" else []  # operands of backward
        assert launched == [*FORWARD, *own, *BACKWARD[layout]], launched
        assert layer.product_counts == {name: {"fp8": 1} for name in DTYPES}
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def check_far_layer():
    """Products of a layer whose input does not fit are right and counted."""
    x, weight, grad = tensors()
    layer, expected = made("fp8", "single_copy", weight), made("bf16", "single_copy", weight)
    x[:, :32] *= 2.0**-20
    for one, other in zip(trained(layer, x, grad), trained(expected, x, grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
    assert layer.product_counts["output"] == {"bf16": 1} == layer.product_counts["grad_weight"]
    assert layer.product_counts["grad_input"] == {"fp8": 1}
    layer(x[:, 32:].repeat(1, 2))
    assert layer.product_counts["output"] == {"bf16": 1, "fp8": 1}


def lonely_matrix(rows, cols, exponents, seed):
    """The first exponent in one block, the last in all others: most sums have only its numbers."""
    matrix = spread_matrix(rows, cols, exponents[-1:], seed)
    matrix[0, :32] *= 2.0 ** (exponents[0] - exponents[-1])
    return matrix


def tensors():
    return (
        spread_matrix(48, 64, [0, -1, 2]),
        spread_matrix(32, 64, [-3, 0], 1),
        spread_matrix(48, 32, [-4, 1], 2),
    )


def product(left, right, dtypes, counter, **options):
    return multiply(left, right, dtypes=dtypes, declined=lambda device: counter, **options)


def check_not_fitting():
    """Products that do not fit are those of float64 up to accumulation; without the kernel they are not."""
    out_dtypes = {1: torch.bfloat16, 4: torch.bfloat16, 5: torch.float16}
    for index, (name, (a, b, dtypes)) in enumerate(NOT_FITTING.items()):
        transposes = list(itertools.product([False, True], repeat=2))
        out_dtype = out_dtypes.get(index, torch.float32)
        for transpose_left, transpose_right in transposes if index < 2 else transposes[index % 4 :][:1]:
            m, k, n = (80, 112, 144) if index < 2 else (16, 48, 32)
            left = factor_of(lonely_matrix(*((k, m) if transpose_left else (m, k)), a, 1))
            right = factor_of(lonely_matrix(*((n, k) if transpose_right else (k, n)), b, 2))
            options = {"transpose_left": transpose_left, "transpose_right": transpose_right}
            expected, bound = error_bound(left, right, **options, out_dtype=out_dtype)
            counter = torch.zeros((), dtype=torch.int32)
            with mock.patch.object(launch_fp8, "PROGRAMS", 2):
                got = product(left, right, dtypes, counter, **options, out_dtype=out_dtype)
            assert got.dtype == out_dtype
            assert ((got.double() - expected).abs() <= bound).all(), name
            assert int(counter) == 1, name
            with mock.patch.object(launch_fp8, "correct"):
                wrong = product(left, right, dtypes, counter, **options, out_dtype=out_dtype)
            is_wrong = not ((wrong.double() - expected).abs() <= bound).all()
            assert is_wrong or "together" in name, name  # there the hardware might flush to zero


def check_spoiled():
    """NaN comes out of a NaN block, and of an operand that is infinite in bf16, as from the bf16 product."""
    options = {"transpose_left": False, "transpose_right": False, "out_dtype": torch.float32}
    for exponents, declined in (([0, -3], 0), ([0, -20], 1)):
        matrix = spread_matrix(32, 96, exponents)
        matrix[3, 70] = torch.nan
        left, right = factor_of(matrix), factor_of(spread_matrix(96, 32, [0], 1))
        counter = torch.zeros((), dtype=torch.int32)
        got = product(left, right, (E4M3, E4M3), counter, **options)
        assert int(counter) == declined
        assert got[3].isnan().all()
        assert int(got.isnan().sum()) == 32
    large, zeros = factor_of(torch.full((16, 32), 3.5 * 2.0**126)), factor_of(torch.zeros(32, 16))
    counter = torch.zeros((), dtype=torch.int32)
    assert product(large, zeros, (E4M3, E4M3), counter, **options).isnan().all()
    assert int(counter) == 1
    for bias in (None, torch.ones(16)):
        got = product(zeros, zeros.__class__(zeros.tensor), (E5M2, E4M3), counter, **options | {
            "transpose_right": True, "bias": None if bias is None else torch.ones(32)
        })  # fmt: skip
        assert torch.equal(got, torch.full((32, 32), 0.0 if bias is None else 1.0))
    assert int(counter) == 1


def check_rules():
    """The kernel and the host have the same rules."""
    codes = factor_of(torch.zeros(16, 32)).tensor

    def on_the_device(left, right, dtypes):
        counter, out = torch.zeros((), dtype=torch.int32), torch.empty(16, 16)
        sides = [
            launch_fp8.Fp8Side(codes.codes, codes.scales, exponents, (16, 32), dtype, transpose)
            for exponents, dtype, transpose in zip((left, right), dtypes, (False, True), strict=True)
        ]
        launch_fp8.correct(out, *sides, counter)
        return int(counter) == 0

    seen = set()
    for left, right in EVERY_SHIFT:
        for dtypes in ((E4M3, E4M3), (E5M2, E4M3)):
            expected = fits(left, right, dtypes)
            assert on_the_device(left, right, dtypes) == expected, (left, right, dtypes)
            seen.add(expected)
    assert seen == {True, False}


def check_fitting():
    for a, b, dtypes in FITTING.values():
        left, right = factor_of(spread_matrix(16, 96, a)), factor_of(spread_matrix(96, 32, b, 1))
        counter = torch.zeros((), dtype=torch.int32)
        options = {"transpose_left": False, "transpose_right": False, "out_dtype": torch.float32}
        got = product(left, right, dtypes, counter, **options)
        expected, bound = error_bound(left, right, **options)
        assert ((got.double() - expected).abs() <= bound).all()
        assert int(counter) == 0


def main():
    assert backends.backend_of(torch.zeros(1)) == "triton"
    group = sys.argv[2]
    if group == "layer":
        check_layer("single_copy")
    elif group == "layers":
        check_layer("per_gemm")
        check_far_layer()
    else:
        check_not_fitting()
        check_spoiled()
        check_fitting()
        check_rules()
    assert exact(factor_of(torch.ones(1, 32))).eq(1).all()
    print("equal")


if __name__ == "__main__":
    main()
