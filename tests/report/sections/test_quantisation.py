"""Quantisation: rates by operand, maps with common colours."""

import re

from made_runs import write_layers, write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.quantisation import maps, rates


def test_rates_have_a_line_for_each_operand_of_each_run(tmp_path):
    one = Drawing(read_runs([write_run(tmp_path / "a", 50)]))
    assert re.findall('data-n="([^"]*)"', rates(one)) == ["input", "weight", "output gradient"] * 3
    two = Drawing(read_runs([tmp_path / "a", write_run(tmp_path / "b", 50)]))
    html = rates(two)
    assert html.count("<polyline") == 18
    assert 'class="line c1 d2" data-n="b, output gradient"' in html
    plain = write_run(tmp_path / "c", 50, rows=lambda step, record: {"step": step, "loss": 2.0})
    assert rates(Drawing(read_runs([plain]))) == ""


def test_maps_of_a_measure_share_their_colours(tmp_path):
    run = write_run(tmp_path / "run", 200)
    write_layers(run, steps=200, layers=6)
    html = maps(Drawing(read_runs([run])))
    assert html.count("<figure") == 9
    saturation = html[: html.index("Underflow by layer")]
    assert set(re.findall('data-low="([^"]*)" data-high="([^"]*)"', saturation)) == {("0.0", "0.5")}
    assert "<span>0 %</span>" in saturation
    assert "<span>0.5 %</span>" in saturation
    assert "one column" not in html


def test_a_single_table_says_how_to_get_more(tmp_path):
    run = write_run(tmp_path / "run", 100)
    write_layers(run, steps=100, layers=2)
    assert "lower megalowbit.telemetry.layers_every (now 100)" in maps(Drawing(read_runs([run])))
