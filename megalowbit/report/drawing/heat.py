"""Heat maps: a picture with one pixel for each cell, enlarged by the browser, with its texts in HTML.

A map of 200 layers and 240 steps is some ten kilobytes. Its colours are a palette of 255 colours from dark
to bright, which colour-blind readers can order, and one transparent entry for cells without a value.
`live.js` reads a value back from the colour of its pixel, so it is exact to 1/254 of the range.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from megalowbit.report.drawing.axis import number_text, ticks
from megalowbit.report.drawing.chart import below_axis

# from dark to bright, with even steps of lightness; blue to yellow, which colour-blind readers can tell apart
ANCHORS = (
    (14, 20, 60), (30, 48, 110), (40, 84, 142), (48, 120, 150), (64, 156, 146), (112, 188, 124),
    (176, 214, 98), (240, 236, 110), (255, 252, 214),
)  # fmt: skip
LEVELS = 255  # colours; index 255 is a cell without a value
EMPTY = 255
SAME = 1e-6  # relative difference of values that have one colour
ROW_PIXELS = 13
LEAST_PIXELS, MOST_PIXELS = 70, 440  # height of a map
LABEL_PIXELS = 11


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A heat map; `html()` draws it.

    Attributes:
        title: above it.
        cells: (rows, columns); NaN: no value.
        rows: names, from the top.
        columns: the step at the end of each column, ascending.
        start: the step before the first column.
        low, high: ends of the colours; values beyond get the colour of the end.
        unit: `%`, `dB` or a word; of a category, names of the values separated by commas.
        colours: classes of categories instead of the palette: RGB of each value 0, 1, …
    """

    title: str
    cells: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[int]
    low: float
    high: float
    start: int = 0
    unit: str = ""
    colours: Sequence[tuple[int, int, int]] = ()

    def html(self) -> str:
        """The map as a `<figure>`."""
        indices = _indices(self.cells, self.low, self.high, len(self.colours))
        wide = _stretched(indices, self.start, self.columns)
        palette = list(self.colours) or palette_colours()
        height = min(MOST_PIXELS, max(LEAST_PIXELS, ROW_PIXELS * len(self.rows)))
        stride = max(1, -(-LABEL_PIXELS * len(self.rows) // height))
        labels = "".join(
            f'<i class="y" style="top:{100 * (row + 0.5) / len(self.rows):.2f}%">{escape(name)}</i>'
            for row, name in enumerate(self.rows)
            if row % stride == 0
        )
        last = self.columns[-1]
        width = (last - self.start) or 1
        x_texts = below_axis(
            [((value - self.start) / width, number_text(value)) for value in ticks(self.start, last)]
        )
        data = {
            "low": repr(self.low),
            "high": repr(self.high),
            "unit": self.unit,
            "start": str(self.start),
            "columns": json.dumps(list(self.columns), separators=(",", ":")),
            "rows": json.dumps(list(self.rows), ensure_ascii=False, separators=(",", ":")),
        }
        if self.colours:
            data["palette"] = json.dumps(list(self.colours), separators=(",", ":"))
        attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
        return (
            f'<figure class="chart heat"><figcaption>{escape(self.title)}</figcaption>'
            f'<div class="plot map" style="height:{height}px" {attributes}>'
            f'<img alt="{escape(self.title)}: {len(self.rows)} layers, {len(self.columns)} columns of steps" '
            f'src="data:image/png;base64,{base64.b64encode(_png(wide, palette)).decode()}">'
            f'{labels}{x_texts}<i class="name">step</i></div></figure>'
        )


def colour_bar(low: str, high: str) -> str:
    """The palette as a bar, with the values of its ends."""
    stops = ",".join(f"rgb({r},{g},{b})" for r, g, b in ANCHORS)
    return (
        f'<p class="bar"><span>{escape(low)}</span><b style="background:linear-gradient(90deg,{stops})"></b>'
        f'<span>{escape(high)}</span><span class="soft">hatched: nothing was counted</span></p>'
    )


def palette_colours() -> list[tuple[int, int, int]]:
    """The colours of a map, `LEVELS` of them from dark to bright; all differ."""
    anchors = np.array(ANCHORS, dtype=float)
    at = np.linspace(0, len(anchors) - 1, LEVELS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return [(int(r), int(g), int(b)) for r, g, b in np.round(np.stack(channels, axis=1))]


def value_range(cells: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The lowest and the highest value of some maps that share their colours."""
    numbers = np.concatenate([each[np.isfinite(each)] for each in cells] or [np.zeros(0)])
    if not numbers.size:
        return 0.0, 1.0
    low, high = float(numbers.min()), float(numbers.max())
    return (low, high) if high - low > SAME * max(abs(low), abs(high)) else (low, low)


def _indices(cells: NDArray[np.float64], low: float, high: float, categories: int) -> NDArray[np.uint8]:
    is_known = np.isfinite(cells)
    if categories:
        return np.where(is_known, np.nan_to_num(cells), EMPTY).astype(np.uint8)
    share = (np.clip(np.where(is_known, cells, low), low, high) - low) / ((high - low) or 1.0)
    return np.where(is_known, np.round(share * (LEVELS - 1)), EMPTY).astype(np.uint8)


def _stretched(cells: NDArray[np.uint8], start: int, columns: Sequence[int]) -> NDArray[np.uint8]:
    """Columns as wide as their steps, so that the horizontal axis is linear; at most 960 pixels."""
    last = columns[-1]
    pixels = min(960, max(last - start, 1))
    edges = np.asarray(columns, dtype=float)
    middles = start + (np.arange(pixels) + 0.5) * ((last - start) or 1) / pixels
    return np.asarray(cells[:, np.minimum(np.searchsorted(edges, middles), len(columns) - 1)])


def _png(indices: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG with a palette; index `EMPTY` is transparent."""
    height, width = indices.shape
    colours = bytearray(3 * 256)
    for number, colour in enumerate(palette):
        colours[3 * number : 3 * number + 3] = bytes(colour)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # filter 0 before each row
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(colours)),
        (b"tRNS", b"\xff" * 255 + b"\x00"),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
