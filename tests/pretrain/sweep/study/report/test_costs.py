"""The costs of recipes of GPT-2 with two blocks, against counts of its products by hand."""

import json
from pathlib import Path

import pytest
from studies import write_study

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.report.costs import costs_of
from megalowbit.pretrain.sweep.study.report.tables import cost_tables, costs_markdown
from megalowbit.pretrain.sweep.study.study_file import read_study

ROOT = Path(__file__).parents[5]
WIDTH, BLOCKS = 32, 2
WEIGHTS = (3 + 1 + 4 + 4) * WIDTH**2  # of a block: c_attn, its c_proj, c_fc, its c_proj
INPUTS = (1 + 1 + 1 + 4) * WIDTH
LAST = {"base": "nvfp4", "name": "last", "keep_last": 1}
SPLIT = {"base": "nvfp4", "name": "split", "parameter_split": {"rank": 8}}
RECIPES = {
    "bf16": {},
    "nvfp4": {},
    "mxfp8": {},
    "late": {"megalowbit.recipe": "nvfp4", "megalowbit.late_switch": {"at": 0.75, "scope": "forward"}},
    "last": {"megalowbit.recipe": LAST},
    "exact-backward": {"megalowbit.recipe": "nvfp4-dequantized-backward"},
    "narrow": {"megalowbit.recipe": "bf16", "train_micro_batch_size_per_gpu": 1},
    "split": {"megalowbit.recipe": SPLIT},
}


@pytest.fixture
def cells(tmp_path):
    path = write_study(tmp_path, steps=8)
    raw = json.loads(path.read_text())
    raw["recipes"] = [
        {"name": name, "set": changes or {"megalowbit.recipe": name}} for name, changes in RECIPES.items()
    ]
    raw["recipes"][0]["lr_factors"] = [1, 2]
    raw["replicas"] = [{"name": "again", "of": "nvfp4", "lr_factor": 1.000001}]
    path.write_text(json.dumps(raw))
    return cells_of(read_study(path), tmp_path / "out", ROOT / "launch" / "pretrain.py")


def tokens_of(cell):
    return (
        cell.config.parts.deepspeed["train_micro_batch_size_per_gpu"]
        * cell.config.settings.data.sequence_length
    )


def test_products_count_by_the_units_that_multiply_them(cells):
    found = {each.label: each for each in costs_of(cells)}
    assert list(found) == ["bf16", "nvfp4", "mxfp8", "late", "last", "exact-backward", "narrow"]
    by_label = {cell.label: cell for cell in cells}
    whole = 3 * BLOCKS * WEIGHTS * tokens_of(cells[0])
    times = {name: each.product_time / whole for name, each in found.items()}
    assert times == pytest.approx(
        {
            "bf16": 1,
            "nvfp4": 1 / 4,
            "mxfp8": 1 / 2,
            "late": 0.75 / 4 + 0.25 * (1 + 1 / 4 + 1 / 4) / 3,
            "last": (1 + 1 / 4) / 2,
            "exact-backward": (1 / 4 + 1 + 1) / 3,
            "narrow": tokens_of(by_label["narrow"]) / tokens_of(by_label["bf16"]),
        }
    )
    shares = {name: each.fp4_share for name, each in found.items()}
    late = 0.75 + 0.25 * 2 / 3
    assert shares == pytest.approx(
        {"bf16": 0, "nvfp4": 1, "mxfp8": 0, "late": late, "last": 1 / 2, "exact-backward": 1 / 3, "narrow": 0}
    )


def test_bytes_are_those_kept_for_backward(cells):
    found = {each.label: each.bytes_kept for each in costs_of(cells)}
    tokens = tokens_of(cells[0])
    assert found["bf16"] == 2 * BLOCKS * INPUTS * tokens  # weights are there anyway
    elements = BLOCKS * (INPUTS * tokens + WEIGHTS)
    # half a byte for an element, one for the scale of 16, and four for each input and each weight
    assert found["nvfp4"] == elements * (1 / 2 + 1 / 16) + 4 * 2 * 4 * BLOCKS
    assert found["late"] == found["nvfp4"]
    assert found["last"] == pytest.approx((found["bf16"] + found["nvfp4"]) / 2)


def test_a_table_has_costs_relative_to_the_baseline(cells):
    costs = costs_of(cells)
    table = cost_tables(costs, "bf16")
    assert list(table) == ["Cost of the linear layers, tiny"]
    rows = {row[0]: row[2:] for row in table["Cost of the linear layers, tiny"]}
    assert rows["bf16"] == ["× 1.00", "0 %"]
    assert rows["last"] == ["× 0.62", "50 %"]
    text = costs_markdown(costs, "bf16")
    assert "| nvfp4 " in text
    assert "Time and share are means over the run." in text
    assert costs_markdown(costs, "split") == ""  # without the baseline's cost there is no measure


def test_lengths_have_their_own_tables_where_a_switch_comes_after_a_number_of_steps(tmp_path, cells):
    raw = json.loads((tmp_path / "study.json").read_text())
    raw["steps"] = [8, 16]
    raw["instability"] = {"window": 4}
    (late,) = [each for each in raw["recipes"] if each["name"] == "late"]
    late["set"]["megalowbit.late_switch"] = {"at": 4, "scope": "all"}
    raw["sizes"] += [{"name": "hot", "stress_of": "tiny", "lr_factor": 4}]
    (tmp_path / "study.json").write_text(json.dumps(raw))
    study = read_study(tmp_path / "study.json")
    every = cells_of(study, tmp_path / "out", ROOT / "launch" / "pretrain.py")
    finished = [cell for cell in every if not (cell.steps == 8 and cell.label == "bf16" and cell.seed == 1)]
    tables = cost_tables(costs_of(finished), "bf16")
    title = "Cost of the linear layers, tiny"
    assert list(tables) == [f"{title}, 8 steps", f"{title}, 16 steps"]  # and none of the stress
    rows = {name: {row[0]: row[3] for row in table} for name, table in tables.items()}
    assert rows[f"{title}, 8 steps"]["late"] == "50 %"
    assert rows[f"{title}, 16 steps"]["late"] == "25 %"
    assert list(rows[f"{title}, 16 steps"])[:2] == ["bf16", "nvfp4"]  # in the order of the study
    same = [each for each in costs_of(finished) if each.label != "late"]
    assert list(cost_tables(same, "bf16")) == [title]
