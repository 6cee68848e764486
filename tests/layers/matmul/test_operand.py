import pytest
import torch

from megalowbit.layers.matmul.operand import MatmulOperand, exact_dtype, transposed_values
from megalowbit.quantize.names import quantizer

X = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr", "int8b", "fp32"])
def test_an_operand_survives_its_parts(name):
    tensor = quantizer(name).quantize(X, with_exponents=name.startswith("mxfp4"))
    operand = MatmulOperand(tensor, is_transposed=True)
    parts, rest = operand.to_parts()
    again = rest.from_parts(parts)
    assert torch.equal(again.tensor.operand(torch.float32), operand.tensor.operand(torch.float32))
    assert again.is_transposed
    if name.startswith("mxfp4"):
        assert again.tensor.exponents is tensor.exponents is not None
    assert rest.tensor.nbytes == 0 or rest.tensor.nbytes < parts[0].nbytes


def test_packing_drops_counts_and_the_ready_operand():
    tensor = quantizer("nvfp4e2m1bnosr").quantize(X, with_counts=True, operand_dtype=torch.bfloat16)
    packed = MatmulOperand(tensor).packed().tensor
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
def test_the_exact_dtype_is_that_of_the_tensors_a_quantizer_makes(name, expected):
    assert exact_dtype(name) == expected
    assert quantizer(name).quantize(X).exact_dtype == expected


def test_transposed_values_take_leading_axes_as_rows():
    values = transposed_values(X.view(4, 5, 40)).operand()
    assert torch.equal(values, X.t())
