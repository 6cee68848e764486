import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import LARGEST_FLOAT32, as_float32, check, is_positive, is_scale


@pytest.mark.parametrize(
    ("value", "is_held"),
    [
        (2.0**-126, True), (LARGEST_FLOAT32, True), (3.4028235e38, True), (1, True), (1e39, False),
        (2.0**128, False), (1e-46, False), (1e-45, False), (2.0**-127, False), (0, False), (-1.0, False),
        (math.nan, False), (10**400, False), ("8", False), (None, False), (True, False),
    ],
)  # fmt: skip
def test_a_scale_is_what_float32_holds_with_its_inverse(value, is_held):
    assert is_scale(value) is is_held


@settings(deadline=None, derandomize=True)
@given(st.floats(width=64, allow_nan=False))
def test_rounding_to_float32_is_that_of_tensors(value):
    assert as_float32(value) == torch.tensor(value, dtype=torch.float64).float().item()


def test_a_check_names_the_argument_its_rule_and_its_value():
    check("clip", 2.0, is_positive(2.0), "a finite number > 0")
    with pytest.raises(UserError, match=r"^clip must be a finite number > 0, not True$"):
        check("clip", True, is_positive(True), "a finite number > 0")
