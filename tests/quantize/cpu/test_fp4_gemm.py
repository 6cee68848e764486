import math

import numpy as np
import pytest
import torch
from kernel_operands import gaussian, same_numbers

from megalowbit.formats.block_format import NVFP4
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.encoding import EncodeRequest, Encoding

pytestmark = pytest.mark.skipif(
    kernels_cpu.LIBRARY.why_unavailable() is not None,
    reason=f"no CPU kernel: {kernels_cpu.LIBRARY.why_unavailable()}",
)
F = np.float32


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_and_bias_rounds_once_after_each_operation(dtype, out_dtype):
    product = torch.cat([gaussian(3, 300) * 10.0**power for power in (-39, -7, -4, 0, 5, 37)]).to(dtype)
    product[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    exact_ties = torch.arange(-600, 600, dtype=torch.float32).view(4, 300) / 256 + 2048
    product = torch.cat([product, exact_ties.to(dtype)])
    for bias in (None, gaussian(300, seed=1, dtype=torch.bfloat16)):
        expected = product.float().numpy() * F(0.3)
        expected = expected if bias is None else expected + bias.float().numpy()
        out = torch.empty(product.shape[0], 310, dtype=out_dtype)[:, :300]
        got = kernels_cpu.scale_and_bias(product, 0.3, bias, out)
        assert got is out
        assert same_numbers(got.contiguous(), torch.from_numpy(expected).to(out_dtype))
        if dtype == out_dtype:
            again = product.clone()
            assert same_numbers(kernels_cpu.scale_and_bias(again, 0.3, bias, again), got.contiguous())


def test_every_half_and_every_tie_between_halves_is_converted_exactly():
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).view(256, 256)
    out = kernels_cpu.scale_and_bias(halves, 1.0, None, torch.empty(256, 256))
    assert same_numbers(out, halves.float())
    near = torch.stack([torch.nextafter(out, torch.tensor(way)) for way in (-math.inf, math.inf)])
    ties = torch.cat([out, *near, (out + out.roll(-1, 1)) / 2])
    got = kernels_cpu.scale_and_bias(ties, 1.0, None, torch.empty(ties.shape, dtype=torch.float16))
    assert same_numbers(got, ties.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (700, 300), (513, 1)], ids=str)
def test_column_sums_are_near_the_exact_ones_and_independent_of_threads(dtype, shape):
    matrix = gaussian(*shape, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        sums = [torch.set_num_threads(count) or kernels_cpu.column_sums(matrix) for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    bound = matrix.double().abs().sum(0) * 2.0**-20
    assert ((sums[0].double() - matrix.double().sum(0)).abs() <= bound).all()
    assert torch.equal(sums[0], kernels_cpu.column_sums(matrix.t().contiguous().t()))


def negated(x):
    """-x as a view that only says so."""
    view = torch.complex(torch.zeros_like(x), x).conj().imag
    assert view.is_neg()
    return view


def test_views_that_only_say_they_are_negated_are_negated():
    x, bias = gaussian(9, 33), gaussian(33, seed=1)
    assert torch.equal(kernels_cpu.column_sums(negated(x)), -kernels_cpu.column_sums(x))
    ours = kernels_cpu.scale_and_bias(negated(x), 1.5, negated(bias), torch.empty(9, 33))
    assert torch.equal(ours, -kernels_cpu.scale_and_bias(x, 1.5, bias, torch.empty(9, 33)))
    amax = torch.tensor(-3.0)
    encoding = Encoding(format=NVFP4)
    ours = kernels_cpu.encode(EncodeRequest(x, encoding, tensor_amax=negated(amax)))
    assert torch.equal(
        ours.tensor_scale, kernels_cpu.encode(EncodeRequest(x, encoding, tensor_amax=-amax)).tensor_scale
    )
