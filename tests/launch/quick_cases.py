"""Which cases run in `make test`; the others are marked slow and run in `make test-all`."""

import itertools

import pytest


def slow_except(quick, cases):
    """Cases for `pytest.mark.parametrize`, all but the `quick` ones marked slow.

    Args:
        quick: the cases that stay in `make test`; it may have others as well, of other tests.
        cases: all of them; a tuple is the values of several arguments.
    """
    cases = list(cases)
    assert any(each in quick for each in cases), f"none of {cases} is in {quick}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def every_value(**axes):
    """Parametrize a test by all combinations; those beyond a few that have each value once are slow."""
    return _parametrize(axes, 1)


def every_pair(**axes):
    """Parametrize a test by all combinations; those beyond a few that have each pair of values are slow."""
    return _parametrize(axes, 2)


def _parametrize(axes, strength):
    names = list(axes)
    choices = [list(values) for values in axes.values()]
    cases = list(itertools.product(*(range(len(values)) for values in choices)))
    quick = covering(cases, strength)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(values[index] for values, index in zip(choices, case, strict=True)),
                marks=() if case in quick else pytest.mark.slow,
            )
            for case in cases
        ],
    )


def covering(cases, strength):
    """Few of the cases, which are tuples, with every combination of `strength` of their places."""

    def parts(case):
        return set(itertools.combinations(enumerate(case), strength))

    missing = set().union(*map(parts, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(parts(case) & missing))
        chosen.append(best)
        missing -= parts(best)
    return chosen
