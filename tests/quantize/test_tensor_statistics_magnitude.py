import math

import numpy as np
import pytest
import torch
from kernel_operands import gaussian
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.quantize.tensor_statistics import in_memory_order, largest_magnitude

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VIEWS = {  # of 24 × 40 × 96
    "all": lambda x: x,
    "turned": lambda x: x.permute(2, 0, 1),
    "flat": lambda x: x.flatten(),
    "slice of the last axis": lambda x: x[..., 7:90],
    "slice of the first axis": lambda x: x[5:9],
    "slice of the middle axis": lambda x: x[:, 3:30],
    "slice of two axes": lambda x: x[:, 3:30, 5:7],
    "every third": lambda x: x[..., ::3],
    "one element": lambda x: x[3, 4, 5],
    "one column": lambda x: x[:, :, 5],
    "repeated": lambda x: x[:1].expand(7, 40, 96),
    "repeated alone": lambda x: x[:1, :1, :1].expand(7, 40, 96),
    "an axis of one": lambda x: x[:, 3:4, 2:50],
}
COPIED = {"slice of two axes"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [*VIEWS.values(), torch._neg_view], ids=[*VIEWS, "negated"])
def test_it_is_that_of_all_elements(dtype, view):
    x = view(gaussian(24, 40, 96, dtype=dtype) + 0.1)
    for each in (x, -x, torch.nn.Parameter(x)):
        found = largest_magnitude(each)
        assert found.dtype == torch.float64
        assert not found.requires_grad
        assert found.item() == np.abs(x.double().resolve_neg().numpy()).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_and_what_is_empty_is_zero(dtype):
    for spoiler in (math.inf, -math.inf):
        x = gaussian(30, 50, dtype=dtype)
        x[7, 9] = spoiler
        assert largest_magnitude(x).item() == math.inf
        x[20, 3] = math.nan
        assert largest_magnitude(x).isnan()
    for shape in ((0,), (0, 5), (3, 0, 2)):
        assert largest_magnitude(torch.empty(shape, dtype=dtype)).item() == 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_that_of_zeros_has_no_sign(zero):
    assert not largest_magnitude(torch.full((3, 5), zero)).signbit()


def test_a_fake_tensor_has_a_fake_one():
    with FakeTensorMode() as mode:
        assert largest_magnitude(mode.from_tensor(gaussian(8, 32))).shape == ()


@pytest.mark.parametrize("name", VIEWS)
def test_the_order_of_memory_is_a_view_wherever_two_axes_describe_it(name):
    base = gaussian(24, 40, 96)
    x = VIEWS[name](base)
    matrix = in_memory_order(x)
    assert matrix.ndim == 2
    assert (matrix.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()) == (name not in COPIED)
    assert torch.equal(matrix.flatten().sort().values, x.flatten().sort().values)
    assert matrix.stride(1) <= matrix.stride(0) or matrix.stride(0) == 0 or len(matrix) == 1
    if name in ("all", "turned", "flat", "slice of the first axis"):
        assert torch.equal(matrix[0], base.flatten() if len(x) != 4 else x.flatten())
