"""Formats the figures of a training step as a table row in plain ASCII, for logs and terminals.

Every figure has a fixed width, so the lines of a run form columns, and a line of at most 78 characters fits
any terminal; with the column for MFU it has seven more. Unknown values are shown as a dash.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from megalowbit.telemetry.facts import Fact, Facts

UNKNOWN = "-"
SKIP = "SKIP"
# elements beyond the format's largest number, not inf or NaN; the name is older than the glossary
SATURATION_RATE = "gradient_overflow/element_overflow_rate"


@dataclass(frozen=True)
class Column:
    """One column: heading, width, name of the fact, and its format."""

    title: str
    width: int
    fact: str
    text: Callable[[Fact], str]


def number(value: Fact) -> float | None:
    """`value` if it is a number."""
    return value if isinstance(value, (int, float)) else None


def _of_known(text: Callable[[float], str]) -> Callable[[Fact], str]:
    """Decorator: format numbers, and show a dash for anything else."""

    @functools.wraps(text)
    def text_or_dash(value: Fact) -> str:
        figure = number(value)
        return UNKNOWN if figure is None else text(figure)

    return text_or_dash


@_of_known
def loss_text(figure: float) -> str:
    """`5.4821`; a short form for large losses and for those that are not finite."""
    return f"{figure:.4f}" if abs(figure) < 1000 else f"{figure:.2e}"


@_of_known
def rate_text(figure: float) -> str:
    """Learning rate, `6.00e-04`."""
    return f"{figure:.2e}"


@_of_known
def norm_text(figure: float) -> str:
    """Gradient norm, four figures."""
    return f"{figure:.3f}" if abs(figure) < 100 else f"{figure:.2e}"


@_of_known
def scale_text(figure: float) -> str:
    """Loss scale; a power of two as such, `2^16`."""
    if figure > 1 and math.isfinite(figure) and math.frexp(figure)[0] == 0.5:
        return f"2^{math.frexp(figure)[1] - 1}"
    return f"{figure:.4g}"


@_of_known
def count_text(figure: float) -> str:
    """A whole number."""
    return f"{figure:.0f}"


@_of_known
def percent_text(figure: float) -> str:
    """A share, `3.51%`; a share too small to show is not shown as zero."""
    return "<0.01%" if 0 < figure < 0.00005 else f"{100 * figure:.2f}%"


@_of_known
def amount_text(figure: float) -> str:
    """A large amount in three or four figures: `950`, `12.3k`, `4.56M`, `1.20T`."""
    if not math.isfinite(figure):
        return UNKNOWN
    for unit in ("", "k", "M", "G", "T"):
        if abs(figure) < 999.5 or unit == "T":
            break
        figure /= 1000
    decimals = 0 if not unit or abs(figure) >= 100 else 1 if abs(figure) >= 10 else 2
    return f"{figure:.{decimals}f}{unit}"


def clock_text(seconds: float | None) -> str:
    """`0:02:13`, from a day on `3d04:05`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours < 24 else f"{hours // 24}d{hours % 24:02}:{minutes:02}"


COLUMNS = (
    Column("loss", 9, "loss", loss_text),
    Column("lr", 9, "lr", rate_text),
    Column("grad_norm", 10, "grad_norm", norm_text),
    Column("scale", 7, "loss_scale", scale_text),
    Column("skips", 6, "skipped_steps", count_text),
    Column("saturated", 10, SATURATION_RATE, percent_text),
    Column("tok/s", 7, "tokens_per_second", amount_text),
)
MFU = Column("MFU", 7, "mfu", percent_text)  # only in runs on a device whose peak is known
_ETA_WIDTH = 10


def columns_of(facts: Facts) -> tuple[Column, ...]:
    """The columns of a run whose steps have these facts."""
    return (*COLUMNS, MFU) if MFU.fact in facts else COLUMNS


def _step_width(total_steps: int) -> int:
    return max(2 * len(str(total_steps)) + 1, len("step"))


def heading(total_steps: int, facts: Facts | None = None) -> str:
    """Headings of the columns of a run whose steps have `facts`."""
    titles = "".join(column.title.rjust(column.width) for column in columns_of(facts or {}))
    return "step".rjust(_step_width(total_steps)) + titles + "ETA".rjust(_ETA_WIDTH)


def line(step: int, total_steps: int, facts: Facts, *, eta: float | None, is_skipped: bool) -> str:
    """Step 1 … `total_steps` as a line below `heading`, `eta` in seconds; a skipped step ends in `SKIP`."""
    # the space is added separately, so a figure wider than its column does not touch the one before
    figures = "".join(
        " " + column.text(facts.get(column.fact)).rjust(column.width - 1) for column in columns_of(facts)
    )
    place = f"{step}/{total_steps}".rjust(_step_width(total_steps))
    text = f"{place}{figures} {clock_text(eta).rjust(_ETA_WIDTH - 1)}"
    return f"{text} {SKIP}" if is_skipped else text
