"""Heat maps: values as colours that can be read back, columns as wide as their steps."""

import base64
import json
import re

import numpy as np
from made_runs import decoded

from megalowbit.report.drawing.heat import EMPTY, Heat, palette_colours, value_range


def test_a_heat_map_has_the_values_in_its_pixels():
    cells = np.array([[0.0, 5.0, 10.0], [np.nan, 10.0, 2.5]])
    heat = Heat(title="t", cells=cells, rows=["a<b", "c"], columns=[10, 20, 30], low=0.0, high=10.0, unit="%")
    html = heat.html()
    (data,) = re.findall(r"data:image/png;base64,([^\"]*)", html)
    indices, chunks = decoded(base64.b64decode(data))
    assert indices.shape == (2, 30)  # a pixel for each step
    assert indices[:, [0, 9, 10, 19, 20, 29]].tolist() == [
        [0, 0, 127, 127, 254, 254],
        [EMPTY, EMPTY, 254, 254, 64, 64],
    ]
    assert chunks[b"tRNS"][EMPTY] == 0
    assert set(chunks[b"tRNS"][:EMPTY]) == {255}
    palette = palette_colours()
    assert len(set(palette)) == len(palette) == EMPTY
    assert chunks[b"PLTE"][:3] == bytes(palette[0])
    assert "a<b" not in html


def test_columns_are_as_wide_as_their_steps():
    heat = Heat(title="t", cells=np.array([[1.0, 0.0]]), rows=["a"], columns=[10, 100], low=0.0, high=1.0)
    (data,) = re.findall(r"data:image/png;base64,([^\"]*)", heat.html())
    indices, _ = decoded(base64.b64decode(data))
    assert (indices[0] == 254).sum() == 10
    assert json.loads(re.findall(r'data-columns="([^"]*)"', heat.html())[0]) == [10, 100]


def test_a_range_of_equal_values_is_one_value():
    assert value_range([np.array([[3.0, np.nan]])]) == (3.0, 3.0)
    assert value_range([np.array([[20.0, 20.0 + 1e-12]])]) == (20.0, 20.0)
    assert value_range([np.array([[1.0]]), np.array([[4.0]])]) == (1.0, 4.0)
    assert value_range([np.array([[np.nan]])]) == (0.0, 1.0)
