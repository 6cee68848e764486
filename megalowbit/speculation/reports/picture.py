"""Pictures of precision speculation: what a run chose and how well it foresaw, and what a threshold costs.

The only file that imports matplotlib, an optional package (`plots`), and only when something is drawn.
Figures are drawn without pyplot, which keeps state for the whole process. Colours are Okabe and Ito's, which
colour-blind readers tell apart too; bf16 is grey, for nothing is gained there. Long runs and large models are
drawn from the changes of precision, so a picture has as many cells as there were decisions, up to a limit.
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
    short_names,
)

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
MOST_COLUMNS = 1500  # of the heat map: more than a screen has for it
MOST_LABELLED_PRODUCTS = 30
MOST_LABELLED_LAYERS = 60


def require_matplotlib() -> None:
    """Find out whether pictures can be drawn, before the work that they are to show.

    Raises:
        UserError: matplotlib is not installed.
    """
    _matplotlib("figure")


def draw_history(history: History, path: Path) -> None:
    """Draw what a run chose and how well it foresaw.

    Precision by product and step; predicted against measured SNR, at once and over time; shares over time.
    The picture is a PNG, whose file is replaced if it is there; the history has at least one look.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    rows = len(history.looks)
    tall = min(14.0, max(1.6, 0.14 * rows))
    figure = _figure(14, tall + 5.6)
    grid = figure.add_gridspec(2, 3, height_ratios=[tall, 4.2])
    _draw_precisions(figure.add_subplot(grid[0, :]), history)
    _draw_predictions(figure.add_subplot(grid[1, 0]), history)
    _draw_gaps_over_time(figure.add_subplot(grid[1, 1]), history)
    _draw_shares(figure.add_subplot(grid[1, 2]), history)
    patches = _matplotlib("patches")
    handles = [patches.Patch(color=COLOURS[name], label=name) for name in history.settings.ladder]
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
    errors: Sequence[float],
    shares: Sequence[Mapping[str, float]],
    max_gap: float,
    suggestion: float | None,
) -> None:
    """Draw what thresholds cost and gain: gap of the loss above, shares of precisions below.

    Args:
        path: a PNG, replaced if it is there.
        thresholds: in dB, ascending.
        gaps: of the loss to bf16 in %, one for each threshold; NaN where a run diverged.
        errors: standard errors of the gaps; NaN where there is one seed.
        shares: by precision, one mapping for each threshold; empty where a run diverged.
        max_gap: in %, what is allowed.
        suggestion: one of the thresholds, or none.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(8, 7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_gaps(above, gaps, errors, max_gap)
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


def _draw_gaps(axes: Axes, gaps: Sequence[float], errors: Sequence[float], max_gap: float) -> None:
    """Gaps with their errors over the places of their thresholds, and what is allowed."""
    places = range(len(gaps))
    bars = [0.0 if math.isnan(error) else error for error in errors]
    axes.errorbar(places, gaps, yerr=bars, color=COLOURS["int8"], marker="o", capsize=4, linewidth=1.6)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axhline(max_gap, color=INK, linewidth=1.2, linestyle="--")
    axes.margins(y=0.15)
    low, high = axes.get_ylim()
    axes.axhspan(low, max_gap, color=COLOURS["mixed"], alpha=0.10, linewidth=0)
    axes.set_ylim(low, high)
    beside, above = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    note = f"allowed: {max_gap:g} %"
    axes.text(0.99, max_gap, note, transform=beside, color=INK, fontsize=8, ha="right", va="bottom")
    for place, gap in zip(places, gaps, strict=True):
        if math.isnan(gap):
            axes.text(place, 0.98, "diverged", transform=above, color=INK, ha="center", va="top")
    axes.set_ylabel("gap of the loss to bf16 (%)")
    axes.set_title("Bars: standard error over the seeds" if any(bars) else "One seed", loc="left")


def _draw_precisions(axes: Axes, history: History) -> None:
    """The heat map: a row for each product, a column for each stretch of steps without a change."""
    edges = _edges(history)
    ladder = list(history.settings.ladder)
    cells = [[ladder.index(name) for name in _at(history, gemm, edges)] for gemm in history.looks]
    colours = _matplotlib("colors").ListedColormap([COLOURS[name] for name in ladder])
    axes.pcolormesh(
        edges,
        [row - 0.5 for row in range(len(cells) + 1)],
        cells,
        cmap=colours,
        vmin=-0.5,
        vmax=len(ladder) - 0.5,
        rasterized=True,
    )
    misses = _misses(history)
    if misses:
        axes.plot(*zip(*misses, strict=True), "x", color=MISS, markersize=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, history.steps), xlabel="optimizer step")
    _label_rows(axes, history)


def _label_rows(axes: Axes, history: History) -> None:
    """Names as small as needed: every product, every layer, or every block of layers."""
    gemms, names = list(history.looks), short_names(history.layers)
    products = ", ".join(dict.fromkeys(gemm.product for gemm in gemms))
    layers = _starts([gemm.layer for gemm in gemms])
    title = "Precision of each product"
    for row in layers[1:]:
        axes.axhline(row - 0.5, color="white", linewidth=0.8 if len(layers) <= MOST_LABELLED_LAYERS else 0.2)
    if len(gemms) <= MOST_LABELLED_PRODUCTS:
        labels = [f"{names[gemm.layer]}  {gemm.product}" for gemm in gemms]
        axes.set_yticks(range(len(gemms)), labels, parse_math=False)  # names may have a $
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
    """Rows whose label is another than that of the row before."""
    return [row for row, label in enumerate(labels) if row == 0 or labels[row - 1] != label]


def _middles(starts: Sequence[int], rows: int) -> list[float]:
    return [(start + end - 1) / 2 for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def _draw_predictions(axes: Axes, history: History) -> None:
    """Predicted against measured SNR, a point for each verified product, in the colour it ran at."""
    checks = history.compared
    axes.set(xlabel="predicted SNR (dB)", ylabel="measured SNR (dB)")
    if not checks:
        axes.set_title("Nothing was verified", loc="left")
        axes.set(xticks=[], yticks=[])
        return
    values = [value for check in checks for value in (check.predicted_db, check.measured_db)]
    thresholds = {name: history.settings.threshold(name) for name in history.settings.ladder[:-1]}
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
    alpha = min(0.6, max(0.1, 300 / len(checks)))
    for name in history.settings.ladder[:-1]:
        _scatter(axes, [check for check in checks if check.precision == name], COLOURS[name], alpha)
    _mark_thresholds(axes, thresholds, high)
    axes.set(xlim=(low, high), ylim=(low, high))
    near = sum(abs(check.gap_db) <= NEAR_DB for check in checks) / len(checks)
    axes.set_title(f"{100 * near:.0f} % of {len(checks):,} predictions within ±{NEAR_DB:g} dB", loc="left")


def _draw_gaps_over_time(axes: Axes, history: History) -> None:
    """Measured minus predicted SNR step by step: points by precision, and the median of each step."""
    checks = history.compared
    axes.set(xlim=(0, history.steps), xlabel="optimizer step", ylabel="measured - predicted (dB)")
    axes.axhspan(-NEAR_DB, NEAR_DB, color=INK, alpha=0.12, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8)
    alpha = min(0.6, max(0.1, 300 / max(1, len(checks))))
    for name in history.settings.ladder[:-1]:
        some = [check for check in checks if check.precision == name]
        steps, gaps = [check.step for check in some], [check.gap_db for check in some]
        axes.plot(steps, gaps, "o", color=COLOURS[name], markersize=3, alpha=alpha, markeredgewidth=0)
    by_step: dict[int, list[float]] = {}
    for check in checks:
        by_step.setdefault(check.step, []).append(check.gap_db)
    steps = sorted(by_step)
    axes.plot(steps, [median(by_step[step]) for step in steps], color=MISS, linewidth=1.4)
    axes.set_title("Median of each step, and every verified product" if steps else "", loc="left")


def _scatter(axes: Axes, checks: Sequence[Verified], colour: str, alpha: float) -> None:
    for is_hit, marker in ((True, "o"), (False, "x")):
        some = [check for check in checks if check.is_hit is is_hit]
        axes.plot(
            [check.predicted_db for check in some],
            [check.measured_db for check in some],
            marker,
            color=colour if is_hit else MISS,
            markersize=4 if is_hit else 6,
            alpha=alpha if is_hit else 1.0,
            markeredgewidth=0 if is_hit else 1.5,
            rasterized=True,
        )


def _mark_thresholds(axes: Axes, thresholds: Mapping[str, float], right: float) -> None:
    """Dashed lines below which a measured ratio is a miss, one for each value that precisions have."""
    for value in sorted(set(thresholds.values())):
        names = [name for name, own in thresholds.items() if own == value]
        colour = COLOURS[names[0]] if len(names) == 1 else INK
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
        text = f"{'threshold' if len(names) == len(thresholds) else ', '.join(names)} {value:g} dB "
        axes.text(right, value, text, color=INK, fontsize=8, ha="right", va="bottom")


def _draw_shares(axes: Axes, history: History) -> None:
    """Shares of products over time, dearest precision at the top."""
    edges = _edges(history)
    columns = list(zip(*(_at(history, gemm, edges) for gemm in history.looks), strict=True))
    shares = [
        [100 * column.count(name) / len(column) for column in [*columns, columns[-1]]]
        for name in history.settings.ladder
    ]
    axes.stackplot(
        edges, shares, colors=[COLOURS[name] for name in history.settings.ladder], step="post", linewidth=0
    )
    axes.set(xlim=(0, history.steps), ylim=(0, 100), xlabel="optimizer step", ylabel="share of products (%)")
    few = share_of_few_bits(history.shares())
    axes.set_title(f"{100 * few:.0f} % of products × steps at 8 bits or fewer", loc="left")


def _edges(history: History) -> list[int]:
    """Steps between which nothing changes, `0 … steps`; evenly thinned where there are too many to draw."""
    changes = {span.start for spans in history.spans.values() for span in spans}
    edges = sorted(changes | {0, history.steps})
    if len(edges) - 1 > MOST_COLUMNS:
        edges = sorted({round(n * history.steps / MOST_COLUMNS) for n in range(MOST_COLUMNS + 1)})
    return edges


def _at(history: History, gemm: Gemm, edges: Sequence[int]) -> list[str]:
    """Precision of a product in the step after each edge but the last."""
    spans = list(history.spans[gemm])
    found = []
    for edge in edges[:-1]:
        while spans[0].end <= edge and len(spans) > 1:  # a layer that is not used any more stays as it was
            del spans[0]
        found.append(spans[0].precision)
    return found


def _misses(history: History) -> list[tuple[float, int]]:
    """Step and row of each miss; in the middle of the step."""
    return [
        (check.step - 0.5, row)
        for row, gemm in enumerate(history.looks)
        for check in history.verified[gemm]
        if not check.is_hit
    ]


def _figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
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
        raise UserError(f"cannot write {path} ({error.strerror or error}): name another file") from None


def _matplotlib(module: str) -> Any:
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise UserError(
            f"pictures need matplotlib ({error}): pip install 'megalowbit[plots]', or leave the picture out"
        ) from None
