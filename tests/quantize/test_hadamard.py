import numpy as np
import pytest
import torch

from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.names import quantizer

SIGNS = 0xB5A3


def explicit_matrix(signs: int) -> np.ndarray:
    """diag(signs) · H16 / 4 with (H16)_ij = (-1)^(number of bits i and j share)."""
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    return np.diag([-1.0 if signs >> i & 1 else 1.0 for i in range(16)]) @ matrix / 4


def test_the_explicit_matrix_is_orthogonal():
    matrix = explicit_matrix(SIGNS)
    assert np.array_equal(matrix @ matrix.T, np.eye(16))


@pytest.mark.parametrize("signs", [0, 1, 0x8000, 0xFFFF, SIGNS])
def test_groups_are_multiplied_by_the_explicit_matrix(signs):
    # whole numbers up to 2^19: the sums of 16 are exact in fp32, so equality is
    x = torch.randint(-(2**19), 2**19, (5, 48), generator=torch.Generator().manual_seed(signs)).float()
    expected = x.double().numpy().reshape(5, 3, 16) @ explicit_matrix(signs)
    assert np.array_equal(hadamard(x, signs).double().numpy(), expected.reshape(5, 48))


def test_sums_are_rounded_in_the_order_of_the_butterfly():
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    rows = []
    for row in x.numpy():
        values = [np.float32(-v) if SIGNS >> j % 16 & 1 else v for j, v in enumerate(row)]
        for half in (1, 2, 4, 8):
            for i in range(len(values)):
                if not i & half:
                    a, b = values[i], values[i + half]
                    values[i], values[i + half] = a + b, a - b
        rows.append([v * np.float32(0.25) for v in values])
    assert np.array_equal(hadamard(x, SIGNS).numpy(), np.array(rows))


def test_norms_and_products_along_the_transformed_axis_are_kept():
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(9, 64, generator=generator), torch.randn(4, 64, generator=generator)
    transformed = hadamard(a, SIGNS).double() @ hadamard(b, SIGNS).double().t()
    assert torch.allclose(transformed, a.double() @ b.double().t(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(hadamard(a, SIGNS).norm(dim=1), a.norm(dim=1))


def test_an_outlier_is_spread_over_its_group_and_no_further():
    x = torch.zeros(1, 48)
    x[0, 20] = 8.0
    transformed = hadamard(x, SIGNS)
    assert (transformed[0, 16:32].abs() == 2).all()
    assert (transformed[0, :16] == 0).all()
    assert (transformed[0, 32:] == 0).all()


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr"])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_quantising_a_transposed_tensor_transforms_along_its_rows(name, tokens):
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens))
    padded = torch.nn.functional.pad(x, (0, 0, 0, -tokens % 16))
    direct = quantizer(name).quantize(hadamard(padded.t().contiguous(), SIGNS))
    got = quantizer(name).quantize_transposed(x, signs=SIGNS)
    assert got.shape == direct.shape == padded.t().shape
    assert torch.equal(got.operand(), direct.operand())
    assert torch.equal(got.scales.view(torch.uint8), direct.scales.view(torch.uint8))
    assert torch.equal(got.codes, direct.codes)  # padding included, which is code 0, not -0


def test_the_product_of_two_transformed_and_quantised_tensors_is_near_the_plain_one():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(200, 32, generator=generator), torch.randn(200, 48, generator=generator)
    both = [quantizer("nvfp4e2m1bnosr").quantize_transposed(each, signs=SIGNS) for each in (x, y)]
    product = both[0].dequantize().double() @ both[1].dequantize().double().t()
    exact = x.double().t() @ y.double()
    assert ((product - exact).norm() / exact.norm()).item() < 0.16
