"""Precisions: formats of a recipe, shares over time, maps of choices."""

import base64
import re

from made_runs import add_attempt, decoded, write_checks, write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.precision import candidates, precisions


def shares(step, record):
    if step % 10 != 1:
        return record
    first = 0.25 if step < 50 else 0.75
    return record | {
        "speculation/share_int8": first,
        "speculation/share_bf16": 1 - first,
        "speculation/share_8bit_or_less": first,
    }


def cells(html):
    return re.findall("<td>([^<]*)</td>", html)


def test_formats_and_layers_are_those_of_the_last_attempt(tmp_path):
    run = write_run(tmp_path / "run", 20)
    facts = {"formats": {"input": "a", "weight": "b", "output gradient": "c"}, "kept_layers": 2}
    add_attempt(run, {**facts, "low_bit_layers": 15, "low_bit_weights": 75, "parameters": 100})
    assert cells(precisions(Drawing(read_runs([run])))) == [
        "run", "nvfp4", "a, b, c", "15 of 17", "75.0 % of all", "–",
    ]  # fmt: skip


def test_a_late_switch_is_named_with_its_step(tmp_path):
    def rows(step, record):
        return record | {"precision_switched": int(step > 12)}

    changes = {"megalowbit.late_switch": {"at": 0.6, "scope": "forward"}}
    run = write_run(tmp_path / "run", 20, rows=rows, changes=changes)
    early = write_run(tmp_path / "early", 10, rows=rows, changes=changes)
    found = cells(precisions(Drawing(read_runs([run, early]))))
    assert found[5] == "after step 12: forward in high precision"
    assert found[11] == "not reached"


def test_shares_are_areas_that_reach_a_hundred_percent(tmp_path):
    run = write_run(tmp_path / "run", 100, rows=shares)
    (read,) = read_runs([run])
    assert candidates(read) == ["int8", "bf16"]
    html = precisions(Drawing([read]))
    (low, high) = re.findall(r'<polygon class="area (\w+)" points="([^"]*)"', html)
    assert (low[0], high[0]) == ("c0", "grey")
    heights = {float(point.split(",")[1]) for point in low[1].split()}
    assert heights == {750, 250, 1000}  # 25 %, later 75 %, above 0
    assert {float(point.split(",")[1]) for point in high[1].split()} == {0, 750, 250}


def test_maps_have_the_candidates_in_the_order_and_colours_of_the_shares(tmp_path):
    run = write_run(tmp_path / "run", 100, rows=shares)
    write_checks(run, steps=100, layers=2, candidates=("bf16", "int8"))
    html = precisions(Drawing(read_runs([run])))
    assert html.count('data-unit="int8,bf16"') == 3
    assert html.count('data-palette="[[0,114,178],[138,143,152]]"') == 3
    assert html.count('data-unit="dB"') == 3
    assert "0 verified products in all checks were below their threshold." in html
    (data, *_) = re.findall(r"data:image/png;base64,([^\"]*)", html)
    indices, _ = decoded(base64.b64decode(data))
    # even layers ran at the first candidate of the checks, bf16, which is number 1 of the shares
    assert indices[:, 0].tolist() == [1, 0]
