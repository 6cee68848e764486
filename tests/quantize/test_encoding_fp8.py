import pytest
import torch

from megalowbit.formats.element import E2M1
from megalowbit.quantize.encoding import BIAS, DEPTH, E4M3, E5M2, MANTISSA, SHIFT


def is_exact(dtype, exponent):
    numbers = torch.tensor(E2M1.grid, dtype=torch.float64) * 2.0**exponent
    return torch.equal(numbers.to(dtype).double(), numbers)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_shift_and_depth_span_the_powers_of_two_at_which_every_element_is_exact(dtype):
    exact = [exponent for exponent in range(-40, 40) if is_exact(dtype, exponent)]
    assert exact == list(range(SHIFT[dtype] - DEPTH[dtype], SHIFT[dtype] + 1))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mantissa_and_bias_are_those_of_the_dtype(dtype):
    one = torch.ones((), dtype=dtype).view(torch.uint8).item()
    assert one == BIAS[dtype] << MANTISSA[dtype]
    assert torch.finfo(dtype).eps == 2.0 ** -MANTISSA[dtype]
