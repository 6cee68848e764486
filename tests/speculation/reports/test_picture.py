import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from forks import run_script
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from quick_cases import slow_except
from run_files import made_up_rows, row, write_run

from megalowbit.errors import UserError
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.reports import picture
from megalowbit.speculation.reports.history import read_history
from megalowbit.speculation.reports.picture import COLOURS, draw_calibration, draw_history
from megalowbit.speculation.settings import BITS

ROOT = Path(__file__).parents[3]
GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
SIZES = {
    "one layer": ["fc"],
    "two blocks": [f"transformer.h.{n}.{name}" for n in range(2) for name in GPT2],
    "GPT-2": [f"transformer.h.{n}.{name}" for n in range(12) for name in GPT2],
    "300 products": [f"model.layers.{n}.self_attn.part_{m}_proj" for n in range(20) for m in range(5)],
}


def gemm_rows(layer, precisions, steps, **more):
    """Checks of one layer's products at the given precisions throughout."""
    return [
        row(step, layer, product, precision, **more)
        for step in steps
        for product, precision in zip(PRODUCTS, precisions, strict=True)
    ]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw a history and return its four panels as they are when they are saved."""

    def drawn(rows, **settings):
        figures = []
        save = picture._save
        monkeypatch.setattr(
            picture, "_save", lambda figure, path: (figures.append(figure), save(figure, path))
        )
        draw_history(read_history(write_run(tmp_path / "run", rows, **settings)), tmp_path / "drawn.png")
        return figures[-1].axes

    return drawn


def pixels(path, name):
    """How many pixels have exactly the colour of a precision."""
    image = imread(path)[..., :3]
    return int((np.abs(image - np.array(to_rgb(COLOURS[name]))).max(axis=-1) < 0.003).sum())


@pytest.mark.slow
def test_areas_are_the_shares_of_steps(tmp_path):
    rows = [
        *gemm_rows("a", ("int8", "int8", "fp8"), range(1, 71)),
        *gemm_rows("a", ("int8", "fp8", "fp8"), range(71, 101)),
    ]
    draw_history(read_history(write_run(tmp_path / "run", rows)), tmp_path / "areas.png")
    # int8: 100 + 70 of 300 steps, in the map and in the shares alike
    assert pixels(tmp_path / "areas.png", "int8") / pixels(tmp_path / "areas.png", "fp8") == pytest.approx(
        170 / 130, rel=0.03
    )


def test_the_map_has_the_precision_of_every_product_and_step(drawn):
    layers, rows = SIZES["two blocks"], list(made_up_rows(SIZES["two blocks"], checks=30))
    map_axes, *_ = drawn(rows)
    mesh = map_axes.collections[0]
    cells, edges = mesh.get_array(), mesh.get_coordinates()[0, :, 0]
    assert cells.shape[0] == 3 * len(layers)
    for each in rows:
        number = layers.index(each["layer"]) * 3 + PRODUCTS.index(each["product"])
        column = np.searchsorted(edges, each["step"]) - 1  # step s lies between s - 1 and s
        assert ("int8", "fp8", "bf16")[int(cells[number, column])] == each["precision"]
    assert map_axes.get_ylim()[0] > map_axes.get_ylim()[1]  # the first layer is at the top
    misses = {(each["step"] - 0.5, layers.index(each["layer"]) * 3 + PRODUCTS.index(each["product"]))
              for each in rows if each["is_hit"] is False}  # fmt: skip
    (crosses,) = [line for line in map_axes.get_lines() if line.get_marker() == "x"]
    assert misses
    assert set(zip(crosses.get_xdata(), crosses.get_ydata(), strict=True)) == misses


def test_predictions_are_plotted_against_measurements_in_the_colour_of_their_precision(drawn):
    verified = {"predicted_db": 20.0, "measured_db": 19.5, "is_hit": True}
    rows = [
        row(1, "a", "output", "int8", **verified),
        row(11, "a", "output", "int8", predicted_db=16.0, measured_db=11.0, is_hit=False),
        row(1, "b", "output", "fp8", **{**verified, "measured_db": 22.0}),
    ]
    _, axes, *_ = drawn(rows, threshold_db={"int8": 15, "fp8": 18})
    points = {
        (line.get_color(), line.get_marker()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if line.get_marker() in "ox" and len(line.get_xdata())
    }
    assert points == {
        (COLOURS["int8"], "o"): [(20.0, 19.5)],
        (picture.MISS, "x"): [(16.0, 11.0)],
        (COLOURS["fp8"], "o"): [(20.0, 22.0)],
    }
    assert axes.get_title(loc="left") == "33 % of 3 predictions within ±1 dB"
    dashed = {
        line.get_color(): line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"
    }
    assert dashed == {COLOURS["int8"]: 15.0, COLOURS["fp8"]: 18.0}


@pytest.mark.parametrize("layers", slow_except({2}, [2, 20, 100]))
def test_names_are_drawn_as_they_are_and_never_as_formulas_or_control_characters(drawn, layers):
    names = [f"h.{number}.$x^{{\x1b\n\x00\ud800" for number in range(layers)]
    map_axes, *_ = drawn([each for name in names for each in gemm_rows(name, ("int8",) * 3, [1])])
    labels = [label.get_text() for label in map_axes.get_yticklabels()]
    assert labels
    assert all(label.isprintable() for label in labels)
    if layers < 100:  # otherwise blocks have labels
        assert labels[0].startswith(r"0.$x^{\x1b\n\x00\ud800")


@pytest.mark.slow
def test_precisions_with_one_threshold_share_a_line(drawn):
    verified = {"predicted_db": 30.0, "measured_db": 30.0, "is_hit": True}
    rows = [row(1, "a", "output", "int8", **verified)]
    _, axes, *_ = drawn(
        rows, candidates=["int4", "int8", "fp8", "bf16"], threshold_db={"int4": 10, "int8": 20, "fp8": 20}
    )
    assert [text.get_text().strip() for text in axes.texts] == ["int4 10 dB", "int8, fp8 20 dB"]
    _, axes, *_ = drawn(rows)
    assert [text.get_text().strip() for text in axes.texts] == ["threshold 15 dB"]


@pytest.mark.slow
def test_over_time_each_gap_has_its_step_and_each_step_its_median(drawn):
    measured = {1: (19.5, 22.0, 20.5), 11: (18.0, 26.0, 19.0)}
    rows = [
        row(step, layer, "output", "int8", predicted_db=20.0, measured_db=value, is_hit=True)
        for step, values in measured.items()
        for layer, value in zip("abc", values, strict=True)
    ]
    _, _, axes, _ = drawn(rows)
    lines = {(line.get_color(), line.get_marker()): line.get_xydata().tolist() for line in axes.get_lines()}
    points = sorted([step, value - 20.0] for step, values in measured.items() for value in values)
    assert sorted(lines[COLOURS["int8"], "o"]) == points
    assert lines[picture.MISS, "None"] == [[1, 0.5], [11, -1.0]]
    assert axes.get_xlim() == (0, 11)


def test_a_run_without_verification_says_so(drawn):
    _, axes, _, shares = drawn(gemm_rows("a", ("int8", "fp8", "bf16"), [1, 11]))
    assert axes.get_title(loc="left") == "Nothing was verified"
    assert shares.get_title(loc="left") == "67 % of products × steps at 8 bits or fewer"


@pytest.mark.parametrize("size", slow_except({"two blocks"}, SIZES))
def test_labels_are_there_and_do_not_touch_at_any_size(drawn, tmp_path, size):
    layers = SIZES[size]
    axes = drawn(list(made_up_rows(layers, checks=12)))[0]
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    axes.figure.draw(renderer)
    boxes = [label.get_window_extent(renderer) for label in axes.get_yticklabels()]
    assert len(boxes) == {"one layer": 3, "two blocks": 24, "GPT-2": 48, "300 products": 20}[size]
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1
    assert all(box.x0 >= 0 for box in boxes)
    height, width = imread(tmp_path / "drawn.png").shape[:2]
    assert max(height, width) <= 3200


@pytest.mark.slow
def test_a_run_of_many_changes_has_no_more_columns_than_can_be_seen(drawn):
    rows = [row(step, "a", "output", ("int8", "fp8")[step % 2]) for step in range(1, 6001)]
    mesh = drawn(rows)[0].collections[0]
    assert mesh.get_array().shape == (1, picture.MOST_COLUMNS)


def test_every_precision_has_a_colour_of_its_own():
    assert set(COLOURS) == set(BITS)
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.slow
def test_calibration_is_drawn_with_diverged_and_single_runs(tmp_path):
    nan = float("nan")
    shares = [{}, {"int8": 0.75, "bf16": 0.25}, {"int8": 0.25, "bf16": 0.75}]
    draw_calibration(
        tmp_path / "calibration.png",
        thresholds=[5, 10, 15],
        gaps=[nan, 0.5, 0.1],
        half_widths=[nan, 0.2, nan],
        shares=shares,
        max_gap=0.3,
        suggestion=15,
    )
    # bars of 75 and 25 % each way: as much int8 as bf16, but for the line and points above
    found = [pixels(tmp_path / "calibration.png", name) for name in ("int8", "bf16")]
    assert found[0] == pytest.approx(found[1], rel=0.06)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    history = read_history(write_run(tmp_path / "run", gemm_rows("a", ("int8", "fp8", "bf16"), [1])))
    with pytest.raises(UserError, match=r"cannot write .*nowhere.*: choose another file"):
        draw_history(history, tmp_path / "nowhere" / "drawn.png")


def python(code, path):
    script = path / "program.py"
    script.write_text(code)
    return run_script(script, env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"})


@pytest.mark.slow
def test_matplotlib_is_imported_on_drawing_and_its_absence_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    load = "import megalowbit.speculation.reports.picture as picture\n"
    assert python(load, tmp_path).returncode == 0
    failed = python(load + "picture.require_matplotlib()", tmp_path)
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("megalowbit.errors.UserError: pictures need matplotlib (no such thing)")
    assert "pip install 'megalowbit[plots]'" in last
