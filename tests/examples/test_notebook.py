"""The notebook for the first FP4 curve: its cells run in order, and the committed file has no outputs."""

import json
from pathlib import Path

import matplotlib as mpl

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_fp4_curve.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_outputs_are_stripped():
    for cell in CELLS:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_cells_run_in_order_and_both_curves_fall(capsys):
    mpl.use("Agg")
    names = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace(
                "STEPS, BATCH, LENGTH = 150, 16, 64", "STEPS, BATCH, LENGTH = 10, 2, 32"
            )
            exec(compile(source, f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    assert names["STEPS"] == 10, "the cell with the sizes has changed"
    losses = names["losses"]
    assert losses["bf16"] != losses["nvfp4"]
    for values in losses.values():
        assert len(values) == 10
        assert values[0] > 5.3  # ln 256 = 5.5
        assert values[-1] < 5.2
    assert [len(axes.lines) for axes in (names["above"], names["below"])] == [2, 2]
    assert "nvfp4: 14 of 15 layers are low-bit" in capsys.readouterr().out
