"""The section about spectra: effective ranks, a chart and a row for each layer."""

from typing import NamedTuple

import numpy as np
import pytest

from megalowbit.report.sections.spectra import effective_rank, spectra


class Given(NamedTuple):
    layer: str
    shape: tuple[int, int]
    plain: np.ndarray
    rounded: np.ndarray
    error: np.ndarray


def test_the_effective_rank_of_equal_values_is_their_number():
    assert effective_rank(np.ones(7)) == pytest.approx(7)
    assert effective_rank(np.array([5.0, 0.0])) == pytest.approx(1)
    assert effective_rank(np.zeros(3)) == 0


def test_the_section_has_a_row_and_a_chart_for_each_layer():
    values = np.array([2.0, 1.0, 0.01]), np.array([2.1, 0.9, 0.02]), np.array([0.1, 0.05, 0.01])
    found = [Given(f"h.{number}.mlp", (48, 32), *values) for number in range(14)]
    html = spectra(found)
    assert html.count("<figure") == 14
    assert html.count("<tr") == 1 + 14
    assert "2 more layers" in html
    assert "<td>48 × 32</td><td>2</td><td>2.1</td><td>0.1</td><td>33 %</td>" in html
    assert "rounds no weights" in spectra([])
