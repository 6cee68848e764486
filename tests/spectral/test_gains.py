import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.errors import UserError
from megalowbit.spectral.gains import GAINS, factors_of, gain


def of_the_users_own(values):
    return torch.full_like(values, 3.0), 1.0


def reads_its_values(values):
    return torch.ones(len(values)) * values[0].item(), 1.0


def takes_two(values, step):
    return values, 1.0


def returns_one(values):
    return values


def is_too_short(values):
    return values[:3], 1.0


def is_not_finite(values):
    return torch.log(values - values[-1]), 1.0


def has_no_residual(values):
    return values, float("nan")


def wants_few(values):
    if len(values) > 20:
        raise RuntimeError("more than\n20 values")
    return values, 1.0


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
def test_gains_accept_few_singular_values(name, count):
    factors, _ = gain(name).function(torch.ones(count))
    assert factors.tolist() == [1.0] * count


def test_a_users_function_is_found_by_its_path():
    found = gain(f"{__name__}:of_the_users_own")
    assert not found.is_before_residual
    assert found.function(torch.ones(2))[0].tolist() == [3.0, 3.0]
    factors, residual = factors_of(found, torch.ones(3))
    assert factors.tolist() == [3.0, 3.0, 3.0]
    assert residual == 1.0


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_function_that_reads_its_values_can_be_named_where_a_model_has_none(mode):
    gain.cache_clear()
    with mode():
        found = gain(f"{__name__}:reads_its_values")
    assert factors_of(found, torch.full((3,), 2.0))[0].tolist() == [2.0, 2.0, 2.0]
    with FakeTensorMode():
        factors, residual = factors_of(found, torch.ones(3))
    assert factors.shape == (3,)
    assert residual == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ysch", "unknown gains 'ysch': did you mean 'ysche'"),
        ("no_such_module:f", r"cannot be imported \(ModuleNotFoundError: No module named .* PYTHONPATH"),
        ("math:no_such_function", r"cannot be imported \(AttributeError: .*: name an importable"),
        (":f", "cannot be imported .*full name of a module"),
        ("..math:sqrt", "cannot be imported .*full name of a module"),
        ("math:sqrt", r"'math:sqrt' raised (TypeError|ValueError): .* on 8 singular values: it takes any"),
        (f"{__name__}:takes_two", r"takes_two' raised TypeError: .*missing 1 required .*returns \(factors"),
        (f"{__name__}:returns_one", r"returned tensor\(.*: return \(factors, factor of the residual\)"),
        (f"{__name__}:is_too_short", r"returned a tensor \(3,\): return a factor for each of 8"),
        (f"{__name__}:is_not_finite", r"returned \[1.9.*-inf\]: return finite factors"),
        (f"{__name__}:has_no_residual", "returned nan for the residual: return a finite number"),
        ("math:pi", "is not a function"),
        (3, "expected one of none, ysche"),
        (None, "expected one of none, ysche"),
    ],
)
def test_wrong_names_are_refused_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as caught:
        gain(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", r"\(ZeroDivisionError: division by zero\): name an importable 'module:function'"),
        ("def f(:", r"\(SyntaxError: .*\): name an importable"),
        ("raise RuntimeError('two\\nlines')", r"\(RuntimeError: two lines\): name an importable"),
        ("import sys; sys.exit(3)", r"\(SystemExit: 3\): name an importable"),
    ],
)
def test_any_import_failure_of_a_users_module_raises_a_one_line_error(body, message, tmp_path, monkeypatch):
    (tmp_path / "gains_of_mine.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"'gains_of_mine:f' cannot be imported {message}") as caught:
        gain("gains_of_mine:f")
    assert "\n" not in str(caught.value)


def test_a_function_that_raises_in_training_is_named_in_one_line():
    found = gain(f"{__name__}:wants_few")
    with pytest.raises(UserError, match="raised RuntimeError: more than 20 values on 60 singular") as caught:
        factors_of(found, torch.ones(60))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)  # for who calls the library
