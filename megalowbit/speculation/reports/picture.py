"""Pictures of precision speculation: choices and predictions of a run, and the calibration of thresholds.

This is the only file that imports matplotlib, an optional package (extra `plots`), and it does so only when
it draws. It avoids pyplot, which keeps global state. The colours are those of Okabe and Ito, which
colour-blind readers can distinguish; bf16 is grey because it saves nothing. The pictures are drawn from the
changes of precision, so their size is limited for long runs and large models.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megalowbit.errors import UserError
from megalowbit.speculation.counters import share_of_few_bits
from megalowbit.speculation.reports.history import (
    NEAR_DB,
    Gemm,
    History,
    Verified,
)
from megalowbit.telemetry.layer_names import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "int4": "#D55E00",
    "nvfp4": "#CC79A7",
    "int8": "#0072B2",
    "mixed": "#009E73",
    "fp8": "#E69F00",
    "bf16": "#D9D9D9",
}
MISS = "#000000"
INK = "#404040"
DOTS_PER_INCH = 150
MOST_COLUMNS = 1500  # of the heat map; more than a screen resolves
MOST_LABELLED_PRODUCTS = 30
MOST_LABELLED_LAYERS = 60


def require_matplotlib() -> None:
    """Raise before the work starts if pictures cannot be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    _matplotlib("figure")


def draw_history(history: History, path: Path) -> None:
    """Draw the precisions of a run and the accuracy of its predictions.

    Panels: precision by product and step; measured against predicted SNR; their difference over time; shares
    of the precisions over time. Writes a PNG and replaces an existing file. The history has at least one
    check.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    rows = len(history.checks)
    tall = min(14.0, max(1.6, 0.14 * rows))
    figure = _figure(14, tall + 5.6)
    grid = figure.add_gridspec(2, 3, height_ratios=[tall, 4.2])
    _draw_precisions(figure.add_subplot(grid[0, :]), history)
    _draw_predictions(figure.add_subplot(grid[1, 0]), history)
    _draw_gaps_over_time(figure.add_subplot(grid[1, 1]), history)
    _draw_shares(figure.add_subplot(grid[1, 2]), history)
    patches = _matplotlib("patches")
    handles = [patches.Patch(color=COLOURS[name], label=name) for name in history.settings.candidates]
    if _misses(history):
        lines = _matplotlib("lines")
        handles.append(lines.Line2D([], [], color=MISS, marker="x", linestyle="", label="miss"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    _save(figure, path)


def draw_calibration(
    path: Path,
    *,
    thresholds: Sequence[float],
    gaps: Sequence[float],
    half_widths: Sequence[float],
    shares: Sequence[Mapping[str, float]],
    max_gap: float,
    suggestion: float | None,
) -> None:
    """Draw the cost and gain of thresholds: the gap in loss at the top, the shares of precisions below.

    Args:
        path: a PNG; an existing file is replaced.
        thresholds: in dB, ascending.
        gaps: gap in loss to bf16 in %, one for each threshold; NaN if a run diverged.
        half_widths: of the intervals of the gaps; NaN with one seed.
        shares: precision → share, one mapping for each threshold; empty if a run diverged.
        max_gap: largest allowed gap in %.
        suggestion: the suggested threshold, or `None`.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(8, 7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_gaps(above, gaps, half_widths, max_gap)
    bottom = [0.0] * len(thresholds)
    for name in next((each for each in shares if each), {}):
        heights = [100 * each.get(name, 0.0) for each in shares]
        below.bar(range(len(shares)), heights, bottom=bottom, color=COLOURS[name], label=name, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    below.set(ylim=(0, 100), ylabel="share of products × steps (%)", xlabel="SNR threshold (dB)")
    names = [f"{value:g}" + ("\nsuggested" if value == suggestion else "") for value in thresholds]
    below.set_xticks(range(len(names)), names)
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels) or 1, frameon=False)
    _save(figure, path)


def _draw_gaps(axes: Axes, gaps: Sequence[float], half_widths: Sequence[float], max_gap: float) -> None:
    """Gaps with error bars, one position for each threshold, and the allowed region."""
    places = range(len(gaps))
    bars = [0.0 if math.isnan(each) else each for each in half_widths]
    axes.errorbar(places, gaps, yerr=bars, color=COLOURS["int8"], marker="o", capsize=4, linewidth=1.6)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axhline(max_gap, color=INK, linewidth=1.2, linestyle="--")
    axes.margins(y=0.15)
    low, high = axes.get_ylim()
    axes.axhspan(low, max_gap, color=COLOURS["mixed"], alpha=0.10, linewidth=0)
    axes.set_ylim(low, high)
    # x in the figure, y in the data; and the other way round
    fixed_x, fixed_y = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    note = f"allowed: {max_gap:g} %"
    axes.text(0.99, max_gap, note, transform=fixed_x, color=INK, fontsize=8, ha="right", va="bottom")
    for place, gap in zip(places, gaps, strict=True):
        if math.isnan(gap):
            axes.text(place, 0.98, "diverged", transform=fixed_y, color=INK, ha="center", va="top")
    axes.set_ylabel("gap in loss to bf16 (%)")
    axes.set_title("Bars: intervals over the seeds (95 %)" if any(bars) else "One seed", loc="left")


def _draw_precisions(axes: Axes, history: History) -> None:
    """The heat map: a row for each product, a column for each interval of steps without a change."""
    edges = _edges(history)
    candidates = list(history.settings.candidates)
    cells = [[candidates.index(name) for name in _at(history, gemm, edges)] for gemm in history.checks]
    colours = _matplotlib("colors").ListedColormap([COLOURS[name] for name in candidates])
    axes.pcolormesh(
        edges,
        [row - 0.5 for row in range(len(cells) + 1)],
        cells,
        cmap=colours,
        vmin=-0.5,
        vmax=len(candidates) - 0.5,
        rasterized=True,
    )
    misses = _misses(history)
    if misses:
        axes.plot(*zip(*misses, strict=True), "x", color=MISS, markersize=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, history.steps), xlabel="optimizer step")
    _label_rows(axes, history)


def _label_rows(axes: Axes, history: History) -> None:
    """Label every product, every layer or every block of layers, depending on the space."""
    gemms, names = list(history.checks), short_names(history.layers)
    products = ", ".join(dict.fromkeys(gemm.product for gemm in gemms))
    layers = _starts([gemm.layer for gemm in gemms])
    title = "Precision of each product"
    for row in layers[1:]:
        axes.axhline(row - 0.5, color="white", linewidth=0.8 if len(layers) <= MOST_LABELLED_LAYERS else 0.2)
    if len(gemms) <= MOST_LABELLED_PRODUCTS:
        labels = [f"{names[gemm.layer]}  {gemm.product}" for gemm in gemms]
        axes.set_yticks(range(len(gemms)), labels, parse_math=False)  # names may contain a $
    elif len(layers) <= MOST_LABELLED_LAYERS:
        axes.set_yticks(
            _middles(layers, len(gemms)), [names[gemms[row].layer] for row in layers], parse_math=False
        )
        title += f"; in each layer from the top: {products}"
    else:
        block_of = [names[gemm.layer].split(".")[0] for gemm in gemms]
        blocks = _starts(block_of)
        for row in blocks[1:]:
            axes.axhline(row - 0.5, color="white", linewidth=1.2)
        axes.set_yticks(_middles(blocks, len(gemms)), [block_of[row] for row in blocks], parse_math=False)
        axes.set_ylabel("block of layers")
        title += f"; in each layer from the top: {products}"
    axes.set_title(title, loc="left")
    axes.tick_params(axis="y", labelsize=8, length=0)


def _starts(labels: Sequence[str]) -> list[int]:
    """Rows whose label differs from that of the row before."""
    return [row for row, label in enumerate(labels) if row == 0 or labels[row - 1] != label]


def _middles(starts: Sequence[int], rows: int) -> list[float]:
    return [(start + end - 1) / 2 for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def _draw_predictions(axes: Axes, history: History) -> None:
    """Measured against predicted SNR: a point for each verified product, in the colour of its precision."""
    verified = history.compared
    axes.set(xlabel="predicted SNR (dB)", ylabel="measured SNR (dB)")
    if not verified:
        axes.set_title("Nothing was verified", loc="left")
        axes.set(xticks=[], yticks=[])
        return
    values = [value for each in verified for value in (each.predicted_db, each.measured_db)]
    thresholds = {name: history.settings.threshold(name) for name in history.settings.candidates[:-1]}
    low, high = min([*values, *thresholds.values()]) - 2, max([*values, *thresholds.values()]) + 2
    axes.fill_between(
        [low, high],
        [low - NEAR_DB, high - NEAR_DB],
        [low + NEAR_DB, high + NEAR_DB],
        color=INK,
        alpha=0.12,
        linewidth=0,
    )
    axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
    alpha = min(0.6, max(0.1, 300 / len(verified)))
    for name in history.settings.candidates[:-1]:
        _scatter(axes, [each for each in verified if each.precision == name], COLOURS[name], alpha)
    _mark_thresholds(axes, thresholds, high)
    axes.set(xlim=(low, high), ylim=(low, high))
    near = sum(abs(each.gap_db) <= NEAR_DB for each in verified) / len(verified)
    axes.set_title(f"{100 * near:.0f} % of {len(verified):,} predictions within ±{NEAR_DB:g} dB", loc="left")


def _draw_gaps_over_time(axes: Axes, history: History) -> None:
    """Measured minus predicted SNR step by step: points by precision, and the median of each step."""
    verified = history.compared
    axes.set(xlim=(0, history.steps), xlabel="optimizer step", ylabel="measured - predicted (dB)")
    axes.axhspan(-NEAR_DB, NEAR_DB, color=INK, alpha=0.12, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8)
    alpha = min(0.6, max(0.1, 300 / max(1, len(verified))))
    for name in history.settings.candidates[:-1]:
        some = [each for each in verified if each.precision == name]
        steps, gaps = [each.step for each in some], [each.gap_db for each in some]
        axes.plot(steps, gaps, "o", color=COLOURS[name], markersize=3, alpha=alpha, markeredgewidth=0)
    by_step: dict[int, list[float]] = {}
    for each in verified:
        by_step.setdefault(each.step, []).append(each.gap_db)
    steps = sorted(by_step)
    axes.plot(steps, [median(by_step[step]) for step in steps], color=MISS, linewidth=1.4)
    axes.set_title("Median of each step, and every verified product" if steps else "", loc="left")


def _scatter(axes: Axes, verified: Sequence[Verified], colour: str, alpha: float) -> None:
    for is_hit, marker in ((True, "o"), (False, "x")):
        some = [each for each in verified if each.is_hit is is_hit]
        axes.plot(
            [each.predicted_db for each in some],
            [each.measured_db for each in some],
            marker,
            color=colour if is_hit else MISS,
            markersize=4 if is_hit else 6,
            alpha=alpha if is_hit else 1.0,
            markeredgewidth=0 if is_hit else 1.5,
            rasterized=True,
        )


def _mark_thresholds(axes: Axes, thresholds: Mapping[str, float], right: float) -> None:
    """Dashed lines at the thresholds, below which a measured SNR is a miss; one for each distinct value."""
    for value in sorted(set(thresholds.values())):
        names = [name for name, own in thresholds.items() if own == value]
        colour = COLOURS[names[0]] if len(names) == 1 else INK
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
        text = f"{'threshold' if len(names) == len(thresholds) else ', '.join(names)} {value:g} dB "
        axes.text(right, value, text, color=INK, fontsize=8, ha="right", va="bottom")


def _draw_shares(axes: Axes, history: History) -> None:
    """Shares of products over time, highest precision at the top."""
    edges = _edges(history)
    columns = list(zip(*(_at(history, gemm, edges) for gemm in history.checks), strict=True))
    shares = [
        [100 * column.count(name) / len(column) for column in [*columns, columns[-1]]]
        for name in history.settings.candidates
    ]
    axes.stackplot(
        edges,
        shares,
        colors=[COLOURS[name] for name in history.settings.candidates],
        step="post",
        linewidth=0,
    )
    axes.set(xlim=(0, history.steps), ylim=(0, 100), xlabel="optimizer step", ylabel="share of products (%)")
    few = share_of_few_bits(history.shares())
    axes.set_title(f"{100 * few:.0f} % of products × steps at 8 bits or fewer", loc="left")


def _edges(history: History) -> list[int]:
    """Steps from 0 to `steps` at which a precision changes; evenly spaced if there are too many to draw."""
    changes = {span.start for spans in history.spans.values() for span in spans}
    edges = sorted(changes | {0, history.steps})
    if len(edges) - 1 > MOST_COLUMNS:
        edges = sorted({round(n * history.steps / MOST_COLUMNS) for n in range(MOST_COLUMNS + 1)})
    return edges


def _at(history: History, gemm: Gemm, edges: Sequence[int]) -> list[str]:
    """The precision of a product in the step after each edge but the last."""
    spans = list(history.spans[gemm])
    found = []
    for edge in edges[:-1]:
        while spans[0].end <= edge and len(spans) > 1:  # an unused layer keeps its last precision
            del spans[0]
        found.append(spans[0].precision)
    return found


def _misses(history: History) -> list[tuple[float, int]]:
    """Position in time and row of each miss; in the middle of the step."""
    return [
        (check.step - 0.5, row)
        for row, gemm in enumerate(history.checks)
        for check in history.verified[gemm]
        if not check.is_hit
    ]


def _figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    figure: Figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}): choose another file") from None


def _matplotlib(module: str) -> Any:
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise UserError(
            f"pictures need matplotlib ({error}): pip install 'megalowbit[plots]', or omit the picture"
        ) from None
