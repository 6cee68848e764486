import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.spectral.gains import GAINS, gain


def of_the_users_own(values):
    return torch.full_like(values, 3.0), 1.0


@pytest.mark.parametrize(
    ("name", "factors", "residual"),
    [
        ("none", [1.0] * 7, 1.0),
        ("ysche", [1.0] * 5 + [1.5] * 2, 2.0),
        ("ysche_seed", [1.0] * 5 + [1.5] * 2, 2.0),
    ],
)
def test_built_in_gains(name, factors, residual):
    values = torch.arange(7, 0, -1.0)
    before = values.clone()
    got, residual_gain = gain(name).function(values)
    assert got.tolist() == factors
    assert residual_gain == residual
    assert torch.equal(values, before)  # Metis changes its caller's tensor
    assert gain(name).is_before_residual == (name == "ysche_seed")


@pytest.mark.parametrize("name", GAINS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_singular_values_are_no_harm(name, count):
    factors, _ = gain(name).function(torch.ones(count))
    assert factors.tolist() == [1.0] * count


def test_a_function_of_ones_own_is_found_by_its_path():
    found = gain("math:sqrt")
    assert found.function(4.0) == 2.0
    assert not found.is_before_residual
    assert gain(f"{__name__}:of_the_users_own").function(torch.ones(2))[0].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ysch", "unknown gains 'ysch': did you mean 'ysche'"),
        ("no_such_module:f", "cannot be imported"),
        ("math:no_such_function", "cannot be imported"),
        (":f", "cannot be imported"),
        ("math:pi", "is no function"),
        (3, "expected one of none, ysche"),
        (None, "expected one of none, ysche"),
    ],
)
def test_wrong_names_are_refused_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as caught:
        gain(name)
    assert "\n" not in str(caught.value)
