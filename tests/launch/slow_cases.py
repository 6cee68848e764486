"""Parametrised tests of which only some cases belong into `make test`."""

import pytest


def slow_except(quick, cases):
    """Cases for `pytest.mark.parametrize`, all but the `quick` ones marked slow.

    Args:
        quick: list of the cases that stay in `make test`.
        cases: all of them; a tuple is the values of several arguments.
    """
    cases = list(cases)
    assert all(each in cases for each in quick), f"no such case among {cases}: {quick}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
