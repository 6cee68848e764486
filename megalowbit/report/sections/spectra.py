"""Spectra of the final weights, as they are and as the recipe rounds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.chart import NUM_COLOURS, Chart, Line
from megalowbit.report.drawing.document import folded, paragraphs, table
from megalowbit.report.sections.curves import grid
from megalowbit.telemetry.layer_names import short_names

POINTS = 120  # of a curve, more of them at large values
OPEN = 12  # layers whose charts are seen at once
MEANING = (
    "Singular values of the weights in hf/, largest first: of the weight, of the weight as the recipe's "
    "forward rounds it, and of the difference of both. Exact decompositions in float64. Where the curve of "
    "the weight is below the largest value of the difference (“under the error”), rounding hides the "
    "direction. A late switch is not considered: the weights are rounded as the recipe says."
)


class Spectrum(Protocol):
    """Singular values of a layer, descending; see `layers.conversion.weight_spectra`."""

    @property
    def layer(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def plain(self) -> ArrayLike: ...
    @property
    def rounded(self) -> ArrayLike: ...
    @property
    def error(self) -> ArrayLike: ...


def spectra(found: Sequence[Spectrum]) -> str:
    """A table of all layers and a chart for each."""
    if not found:
        return paragraphs(["The recipe rounds no weights."])
    names = short_names([each.layer for each in found])
    charts = [_chart(names[each.layer], each) for each in found]
    head = [
        "layer",
        "shape",
        "largest",
        "rounded",
        "largest of the error",
        "under the error",
        "effective rank",
        "rounded",
    ]
    rows = [_row(names[each.layer], each) for each in found]
    return (
        grid(charts[:OPEN])
        + folded(f"{len(charts) - OPEN} more layers", grid(charts[OPEN:]))
        + table(head, rows)
        + paragraphs([MEANING, "Effective rank: exp of the entropy of σ² ÷ Σσ²."], "note")
    )


def _chart(name: str, spectrum: Spectrum) -> str:
    curves = {"weight": spectrum.plain, "rounded": spectrum.rounded, "difference": spectrum.error}
    lines = []
    for style, (label, values) in enumerate(curves.items()):
        numbers = np.asarray(values, dtype=float)
        picked = np.unique(np.round(np.geomspace(1, len(numbers), POINTS)).astype(int)) - 1
        dash = NUM_COLOURS if label == "rounded" else 0  # it hides the weight where both are equal
        lines.append(Line(label, picked + 1, numbers[picked], style + dash))
    largest = len(np.asarray(spectrum.plain))
    heights = np.concatenate([np.asarray(line.y) for line in lines])
    heights = heights[heights > 0]
    y = Axis(float(heights.min()), float(heights.max()), 10) if heights.size else None
    return Chart(
        title=name, parts=lines, x=Axis(1.0, float(max(2, largest)), 10), y=y, x_name="number"
    ).html()


def _row(name: str, spectrum: Spectrum) -> list[str]:
    plain, rounded, error = (
        np.asarray(each, dtype=float) for each in (spectrum.plain, spectrum.rounded, spectrum.error)
    )
    return [
        name,
        " × ".join(map(str, spectrum.shape)),
        f"{plain[0]:.4g}",
        f"{rounded[0]:.4g}",
        f"{error[0]:.3g}",
        f"{100 * float((plain < error[0]).mean()):.0f} %",
        f"{effective_rank(plain):.1f}",
        f"{effective_rank(rounded):.1f}",
    ]


def effective_rank(values: NDArray[np.float64]) -> float:
    """The exponential of the entropy of the shares of the squares; 0 for a matrix of zeros."""
    energy = values**2
    if not energy.sum() > 0:
        return 0.0
    shares = energy / energy.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))
