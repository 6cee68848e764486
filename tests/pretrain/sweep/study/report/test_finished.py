"""Finished cells: losses, times, and which of them compare."""

import math
from pathlib import Path

import pytest
from studies import RESULT

from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.report.finished import check_equal_tokens, finished_cells
from megalowbit.pretrain.sweep.study.study_file import study_of

STUDY = {
    "base": "base.json",
    "sizes": [{"name": "s"}],
    "texts": [{"name": "one", "source": "stdlib"}],
    "seeds": [1, 2],
    "steps": [8],
    "recipes": [{"name": "bf16"}, {"name": "good"}],
    "baseline": "bf16",
    "window": 2,
    "marks": [4],
}
LOSSES = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
COST = {**RESULT["cost"], "cpu_seconds": 4.0, "steps": 8}


def result_of(**more):
    heldout = {"bf16": 1.5, "own": None, "tokens": 9}
    return {**RESULT, "losses": LOSSES, "tokens": 640, "heldout": heldout, "cost": COST, **more}


@pytest.fixture
def cells(tmp_path):
    (tmp_path / "base.json").write_text('{"megalowbit": {}}')
    study = study_of(STUDY, "study", tmp_path)
    cells = cells_of(study, tmp_path, Path(__file__).parents[5] / "launch" / "pretrain.py")
    for cell in cells:
        cell.write("result.json", result_of())
    return cells


def test_losses_are_means_of_windows_until_the_run_diverges(cells):
    cells[0].write("result.json", result_of(diverged_at=7, losses=[*LOSSES[:6], None, None], heldout=None))
    (cells[3].path / "result.json").unlink()
    lost, whole, _ = finished_cells(cells)
    assert [whole.loss_to(step) for step in (2, 4, 8)] == [7.5, 5.5, 1.5]
    assert lost.loss_to(6) == 3.5
    assert math.isnan(lost.loss_to(8))
    assert (lost.is_diverged, whole.is_diverged) == (True, False)
    assert whole.heldout("bf16") == 1.5
    assert math.isnan(whole.heldout("own"))
    assert math.isnan(lost.heldout("bf16"))
    assert (whole.key, whole.cpu_seconds()) == (("one", 1), 0.5)


@pytest.mark.parametrize("cost", [{"steps": 3}, {"cpu_seconds": 0.0}])
def test_without_the_time_of_all_steps_a_step_has_none(cells, cost):
    cells[0].write("result.json", result_of(cost={**COST, **cost}))
    assert math.isnan(finished_cells(cells)[0].cpu_seconds())


@pytest.mark.parametrize(
    ("origin", "cost", "is_like"),
    [
        ({}, {}, True),
        ({"units": "avx2"}, {}, False),  # the other one has none
        ({"processor": "two"}, {}, False),
        ({}, {"threads": 8}, False),
    ],
)
def test_times_of_other_processors_and_threads_do_not_compare(cells, origin, cost, is_like):
    other = result_of(made_with={**RESULT["made_with"], **origin}, cost={**COST, **cost})
    cells[1].write("result.json", other)
    one, two, *_ = finished_cells(cells)
    assert one.ran_like(two) is two.ran_like(one) is is_like


@pytest.mark.parametrize("key", ["settings", "losses", "diverged_at", "heldout", "cost"])
def test_a_damaged_result_is_named(cells, key):
    result = result_of()
    for damaged in ({**result, key: "?"}, {name: value for name, value in result.items() if name != key}):
        cells[2].write("result.json", damaged)
        with pytest.raises(
            UserError, match=rf"result.json is no result .*'{key}' is missing or damaged.*remove"
        ):
            finished_cells(cells)


def test_cells_with_other_numbers_of_tokens_are_not_compared(cells):
    check_equal_tokens(finished_cells(cells))
    cells[3].write("result.json", result_of(tokens=320))
    with pytest.raises(UserError, match=r"different numbers of tokens \(.*640; .*320\)"):
        check_equal_tokens(finished_cells(cells))
