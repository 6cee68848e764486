"""A small canvas for the pictures of the docs: boxes, arrows, text, points; the result is an SVG."""

from collections.abc import Sequence
from html import escape

INK, GREY, PALE = "#1c2733", "#68788a", "#eef2f6"
BLUE, ORANGE, GREEN = "#1f6feb", "#c2540a", "#1a7f37"
BLUE_PALE, ORANGE_PALE, GREEN_PALE = "#e3eefc", "#fbe9dc", "#e2f3e6"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
LINE_HEIGHT = 16


class Picture:
    """A picture of a width and a height in pixels, on white: it is readable in a dark page too.

    Args:
        title: what the picture shows, for people who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rectangle(self, x, y, width, height, fill=PALE, stroke="none", radius=4) -> None:
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self.parts.append(f'<rect {place} rx="{radius}" fill="{fill}" stroke="{stroke}"/>')

    def line(self, x1, y1, x2, y2, stroke=GREY, width=1.0, dashed=False) -> None:
        ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{_number(width)}"{dashes}/>')

    def arrow(self, *points: tuple[float, float], stroke=GREY) -> None:
        """A line through all points, with a head at the last one."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        style = f'fill="none" stroke="{stroke}" stroke-width="1.5" marker-end="url(#head)"'
        self.parts.append(f'<polyline points="{path}" {style}/>')

    def path(self, points: Sequence[tuple[float, float]], stroke=GREY, width=1.0) -> None:
        """A line through all points."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{_number(width)}"/>'
        )

    def circle(self, x, y, radius, fill=BLUE) -> None:
        self.parts.append(
            f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" fill="{fill}"/>'
        )

    def text(self, x, y, text, size=13, fill=INK, anchor="start", bold=False) -> None:
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}'
        self.parts.append(f'<text x="{_number(x)}" y="{_number(y)}" {style}>{escape(text)}</text>')

    def box(self, x, y, width, height, *lines: str, fill=PALE, stroke=GREY) -> None:
        """A box with lines of text in its middle; the first is bold if there are several."""
        self.rectangle(x, y, width, height, fill, stroke)
        top = y + height / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            is_title = number == 0 and len(lines) > 1
            size, colour = (13, INK) if number == 0 else (12, GREY)
            self.text(x + width / 2, top + number * LINE_HEIGHT, line, size, colour, "middle", is_title)

    def svg(self) -> str:
        """The picture as text."""
        size = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}" width="{_number(self.width)}"'
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{escape(FONT)}">',
            f"<title>{escape(self.title)}</title>",
            head,
            f'<rect width="{_number(self.width)}" height="{_number(self.height)}" fill="#fff"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
