import pytest
import torch

from megalowbit.layers.matmul.operand import (
    ExponentRange,
    Factor,
    exact_dtype,
    is_block_quantizer,
    serves_both_axes,
    transposed_values,
)
from megalowbit.quantize.names import quantizer

X = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr", "int8b", "fp32"])
def test_a_factor_survives_its_parts(name):
    exponents = ExponentRange(lowest=120, highest=125)
    factor = Factor(quantizer(name).quantize(X), is_transposed=True, exponents=exponents)
    parts, rest = factor.to_parts()
    again = rest.from_parts(parts)
    assert torch.equal(again.tensor.operand(torch.float32), factor.tensor.operand(torch.float32))
    assert (again.is_transposed, again.exponents) == (True, exponents)
    assert rest.tensor.nbytes == 0 or rest.tensor.nbytes < parts[0].nbytes


def test_packing_drops_counts_and_the_ready_operand():
    tensor = quantizer("nvfp4e2m1bnosr").quantize(X, with_counts=True, operand_dtype=torch.bfloat16)
    packed = Factor(tensor).packed().tensor
    assert packed.ready_operand is None
    assert packed.counts is packed.error is None
    assert torch.equal(packed.operand(), tensor.operand())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4e2m1b", torch.bfloat16),
        ("mxfp4e2m1b", torch.bfloat16),
        ("int8", torch.bfloat16),
        ("int8b", torch.float32),
        ("fp32", None),
    ],
)
def test_the_exact_dtype_is_that_of_the_tensors_a_quantiser_makes(name, expected):
    assert exact_dtype(name) == expected
    assert quantizer(name).quantize(X).exact_dtype == expected


@pytest.mark.parametrize(
    "name", ["nvfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16", "int8", "mxfp4e2m1bnosr", "int4b"]
)
def test_a_quantiser_that_serves_both_axes_gives_the_transpose_the_same_numbers(name):
    q = quantizer(name)
    rows, columns = q.quantize(X), q.quantize_transposed(X)
    same = torch.equal(rows.operand(torch.float32).t(), columns.operand(torch.float32))
    assert same == serves_both_axes(name)


def test_only_block_quantisers_pack_blocks():
    assert is_block_quantizer("nvfp4e2m1b")
    assert not is_block_quantizer("fp32")
    assert serves_both_axes("fp32")


def test_transposed_values_take_leading_axes_as_rows():
    values = transposed_values(X.view(4, 5, 40)).operand()
    assert torch.equal(values, X.t())
