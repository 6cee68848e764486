"""The text of the dashboard: what is known of a run, laid out for a width and a number of rows.

`RunState` follows the facts and keeps the last known value of each. `frame` is a function of the state alone,
and writes nothing. Rows are left out from the least important one on if there is no room; the row with the
progress is the last to go.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.text import Text

from megalowbit.telemetry import columns
from megalowbit.telemetry.columns import number
from megalowbit.telemetry.facts import Fact, Facts

SHARE = "speculation/share_"
BITS = "8bit_or_less"  # a sum of other shares
MOST_BUCKETS = 240  # of the sparkline; then two become one
MOST_WARNINGS = 2
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
FULL, EMPTY, ASCII_FULL, ASCII_EMPTY = "━", "─", "#", "-"
SHORTEST_BAR = 6
GAP = 2


class Curve:
    """Means of a series over equal parts, at most `MOST_BUCKETS`; values that are not finite are left out."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._size, self._sum, self._count = 1, 0.0, 0  # steps of a bucket; those of the open one

    def add(self, value: float | None) -> None:
        """Add the value of the next step."""
        if value is None or not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._size:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) >= MOST_BUCKETS:
            self._means = [sum(pair) / 2 for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._size *= 2

    def drawn(self, width: int, bars: str) -> str:
        """The curve in at most `width` characters, from its lowest to its highest value."""
        values = self._means + ([self._sum / self._count] if self._count else [])
        if width < 1 or not values:
            return ""
        if len(values) > width:
            cuts = [round(index * len(values) / width) for index in range(width + 1)]
            values = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(cuts)]
        lowest, span = min(values), max(values) - min(values)
        return "".join(
            bars[round((value - lowest) / span * (len(bars) - 1)) if span else 0] for value in values
        )


@dataclass
class RunState:
    """What the dashboard shows.

    Attributes:
        title: of the run.
        total_steps: steps of the whole run.
        step: the newest one.
        eta: seconds left; None: unknown.
        facts: the last known value of each.
        losses: of the steps of this process.
        warnings: the newest ones.
    """

    title: str
    total_steps: int
    step: int = 0
    eta: float | None = None
    facts: dict[str, Fact] = field(default_factory=dict)
    losses: Curve = field(default_factory=Curve)
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_WARNINGS))

    def add(self, step: int, facts: Facts, eta: float | None) -> None:
        """Follow a step; a skipped one and a rollback are warnings."""
        rollbacks = number(facts.get("rollbacks")) or 0
        if rollbacks > (number(self.facts.get("rollbacks")) or 0):
            self.warnings.append(f"rolled back to step {step - 1}, rollback {rollbacks:.0f} of the run")
        if "skipped/tensor" in facts:
            where = f"{facts['skipped/tensor']} on rank {facts.get('skipped/rank')}"
            self.warnings.append(f"step {step} skipped: overflow in {where}")
        # a new check may have other precisions than the one before
        is_check = any(name.startswith(SHARE) for name in facts)
        kept = {n: v for n, v in self.facts.items() if not (is_check and n.startswith(SHARE))}
        self.facts = {**kept, **{name: value for name, value in facts.items() if value is not None}}
        self.facts["grad_norm"] = facts.get("grad_norm")  # of this step: a skipped one has none
        self.step, self.eta = step, eta
        self.losses.add(number(facts.get("loss")))


def _duration(value: Fact) -> str:
    figure = number(value)
    if figure is None:
        return columns.UNKNOWN
    return f"{figure:.3g} ms" if figure < 999.5 else f"{figure / 1000:.3g} s"


def _gib(value: Fact) -> str:
    figure = number(value)
    return columns.UNKNOWN if figure is None else f"{figure:.3g} GiB"


def _decibels(value: Fact) -> str:
    figure = number(value)
    return columns.UNKNOWN if figure is None else f"{figure:.1f} dB"


# label, fact, its text; the second part only if the fact is known
ALWAYS: tuple[tuple[str, str, Callable[[Fact], str]], ...] = (
    ("lr", "lr", columns.rate_text),
    ("grad norm", "grad_norm", columns.norm_text),
    ("scale", "loss_scale", columns.scale_text),
    ("skips", "skipped_steps", columns.count_text),
    ("tok/s", "tokens_per_second", columns.amount_text),
)
IF_KNOWN: tuple[tuple[str, str, Callable[[Fact], str]], ...] = (
    ("step", "step_ms", _duration),
    ("MFU", "mfu", columns.percent_text),
    ("GPU", "device_memory_gib", _gib),
    ("host", "host_memory_gib", _gib),
    ("tokens", "tokens", columns.amount_text),
    ("saturated", columns.SATURATION_RATE, columns.percent_text),
    ("underflow", "gradient_overflow/underflow_rate", columns.percent_text),
    ("SNR", "quantization/grad_output/snr_db", _decibels),
)


def frame(state: RunState, width: int, rows: int, *, is_ascii: bool = False) -> list[Text]:
    """The rows of the dashboard, each at most `width` columns wide, at most `rows` of them."""
    if width < 1 or rows < 1:
        return []
    figures = list(_figures(state, width))
    parts: list[tuple[int, list[Text]]] = [  # importance, rows
        (2, [_rule(state, width, is_ascii)]),
        (6, [_progress(state, width, is_ascii)]),
        (5, [_loss(state, width, is_ascii)]),
        (4, figures),
        (1, [each] if (each := _precisions(state)) is not None else []),
        (3, [Text(f"! {one_line(warning)}", style="yellow") for warning in state.warnings]),
    ]
    while sum(len(part) for _, part in parts) > rows:
        _, least = min(((importance, part) for importance, part in parts if part), key=lambda pair: pair[0])
        least.pop()
    lines = [line for _, part in parts for line in part]
    for line in lines:
        line.truncate(width, overflow="crop" if is_ascii else "ellipsis")
    return lines


def one_line(text: str) -> str:
    """A message without line breaks and control characters, which would move the cursor."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def _rule(state: RunState, width: int, is_ascii: bool) -> Text:
    line = ASCII_EMPTY if is_ascii else EMPTY
    title = one_line(state.title)
    text = Text(f"{line * 2} ", style="dim").append(title, style="bold")
    return text.append(f" {line * max(width - text.cell_len - 1, 0)}")


def _progress(state: RunState, width: int, is_ascii: bool) -> Text:
    share = min(state.step / max(state.total_steps, 1), 1.0)
    text = Text().append(f"{state.step:,}/{state.total_steps:,}", style="bold")
    rest = Text(f" {share:.0%}", style="bold cyan").append(f"  ETA {columns.clock_text(state.eta)}", "bold")
    room = width - text.cell_len - rest.cell_len - 1
    if room >= SHORTEST_BAR:
        done = round(share * room)
        full, empty = (ASCII_FULL, ASCII_EMPTY) if is_ascii else (FULL, EMPTY)
        text.append(" ").append(full * done, style="cyan").append(empty * (room - done), style="dim")
    return text.append_text(rest)


def _loss(state: RunState, width: int, is_ascii: bool) -> Text:
    text = _labelled("loss", columns.loss_text(state.facts.get("loss")), "bold cyan")
    validation = state.facts.get("validation/loss")
    rest = Text() if validation is None else _labelled("val", columns.loss_text(validation), "cyan")
    room = width - text.cell_len - rest.cell_len - GAP * (1 + (rest.cell_len > 0))
    curve = state.losses.drawn(room, ASCII_BARS if is_ascii else BARS)
    if curve:
        text.append(" " * GAP).append(curve, style="cyan")
    return text.append(" " * GAP).append_text(rest) if rest.cell_len else text


def _figures(state: RunState, width: int) -> Iterator[Text]:
    """Labelled figures, as many in each row as fit."""
    shown = [(label, text(state.facts.get(name))) for label, name, text in ALWAYS]
    shown += [(label, text(state.facts[name])) for label, name, text in IF_KNOWN if name in state.facts]
    row = Text()
    for label, value in shown:
        each = _labelled(label, value, "bold yellow" if label == "skips" and value not in ("0", "-") else "")
        if row.cell_len and row.cell_len + GAP + each.cell_len > width:
            yield row
            row = Text()
        row.append(" " * GAP if row.cell_len else "").append_text(each)
    yield row


def _precisions(state: RunState) -> Text | None:
    """Shares of the products by precision in the last check, the largest first."""
    shares = {name.removeprefix(SHARE): number(value) for name, value in state.facts.items() if SHARE in name}
    found = sorted(((share or 0.0, name) for name, share in shares.items() if name != BITS), reverse=True)
    if not found:
        return None
    text = Text("precision", style="dim")
    for share, name in found:
        text.append(f"  {name} ", style="dim").append(f"{share:.0%}", style="")
    return text


def _labelled(label: str, value: str, style: str) -> Text:
    return Text().append(f"{label} ", style="dim").append(value, style=style)
