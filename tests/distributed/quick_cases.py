"""Which cases run in `make test`; the others are marked slow and run in `make test-all`."""

import itertools

import pytest


def marked(names, quick):
    """Parameters of a test; those that are not among the quick ones are marked slow."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow, id=str(name)) for name in names
    ]


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
