"""A layer that leaves the others is named; what many layers do together is not."""

import pytest
from small_runs import LAYERS

from megalowbit.findings import base
from megalowbit.findings.layers import findings

ODD = LAYERS[6]


def test_a_healthy_run_and_one_without_tables_have_no_finding(records, tmp_path):
    assert not findings(records.read(tmp_path / "healthy"))
    records.tables = {60: records.tables[60]}
    assert not findings(records.read(tmp_path / "one-table"))
    records.tables = {}
    assert not findings(records.read(tmp_path / "no-table"))


def test_weights_that_jump_in_one_layer_are_named_with_their_steps(records, tmp_path):
    for step in (40, 50, 60):
        records.tables[step][ODD, "weight"]["squared_norm"] *= 1e4
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.LAYER, 31)
    assert f"weights of {ODD} jumped between steps 31 and 40" in found.title
    assert "+40.0 dB" in found.evidence[0].text  # hundredfold root mean square


@pytest.mark.parametrize("part", ["saturated", "saturated_scales", "zero_blocks", "underflow"])
def test_an_operand_that_no_longer_fits_its_format_is_named(records, tmp_path, part):
    for step in (30, 40, 50, 60):
        records.tables[step][ODD, "input"][part] = 230 if part[-1] == "s" and part != "saturated" else 3600
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.LAYER, 21)
    assert f"of the input of {ODD}" in found.title
    assert "before at most" in found.evidence[0].text


def test_what_all_layers_do_is_no_matter_of_one(records, tmp_path):
    for step in (40, 50, 60):
        for layer in LAYERS:
            records.tables[step][layer, "weight"]["squared_norm"] *= 1e4
            records.tables[step][layer, "input"]["saturated"] = 3600
    assert not findings(records.read(tmp_path / "run"))


def test_slow_growth_of_one_layer_is_healthy(records, tmp_path):
    for number, step in enumerate(records.tables):
        records.tables[step][ODD, "weight"]["squared_norm"] *= 1.5**number
        records.tables[step][ODD, "grad_output"]["underflow"] = 250 + 200 * number
    assert not findings(records.read(tmp_path / "run"))
