"""What speculation did in a run, read back from its folder: a line of `speculation.jsonl` a look and product.

A line of step s says at which precision the product ran in step s, and so since the look before, what was
foretold for it and, where it was verified, what was found; and at which precision it runs after that step.
Every line is checked; a file that was edited or cut is told in one line and never averaged over.
Not covered: writing the file, which the run does, and pictures (`picture.py`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from megalowbit.errors import UserError, invalid_settings, shown
from megalowbit.json_text import is_finite_number, read_json_object
from megalowbit.speculation.counters import FEW_BITS, share_of_few_bits
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.report import GemmRow
from megalowbit.speculation.settings import SpeculationSettings

FILE = "speculation.jsonl"
NEAR_DB = 1.0  # what a prediction may be off by
ROW_KEYS = tuple(field.name for field in fields(GemmRow))
DECIBELS = ("predicted_db", "measured_db")
RATIOS = ("left_ratio", "right_ratio")
MOST_DB = 10_000  # a ratio of two float64 energies has fewer
MOST_STEPS = 10**15


class Gemm(NamedTuple):
    """One product of one layer."""

    layer: str
    product: str


class Span(NamedTuple):
    """Steps after `start`, up to and with `end`, at one precision."""

    start: int
    end: int
    precision: str


class Verified(NamedTuple):
    """A product that was compared with its high-precision form; ratios in dB.

    Attributes:
        step: the step it was compared in.
        precision: what it ran at.
        predicted_db: foretold for it from that step's statistics; NaN where they were not finite.
        measured_db: found; NaN where it was not finite.
        is_hit: whether that reached the threshold.
    """

    step: int
    precision: str
    predicted_db: float
    measured_db: float
    is_hit: bool

    @property
    def gap_db(self) -> float:
        """Measured less predicted; negative: noisier than foretold; NaN where one of them is."""
        return self.measured_db - self.predicted_db


@dataclass(frozen=True, kw_only=True)
class History:
    """All looks of a run.

    Attributes:
        folder: of the run.
        settings: ladder, thresholds and the rest, as the run had them.
        steps: steps of the run; up to and with the last look while it is going on.
        looks: for each product, steps (counted from 1) and rows of its looks, ascending; layers in the
            model's order, products in the order output, grad_input, grad_weight.
        afterwards: at which precision each product runs after its last look.
    """

    folder: Path
    settings: SpeculationSettings
    steps: int
    looks: Mapping[Gemm, tuple[tuple[int, GemmRow], ...]]
    afterwards: Mapping[Gemm, str]

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the model's order."""
        return list(dict.fromkeys(gemm.layer for gemm in self.looks))

    @cached_property
    def spans(self) -> dict[Gemm, tuple[Span, ...]]:
        """At which precision each product ran when, from step 0 to `steps`, without gaps."""
        found = {}
        for gemm, looks in self.looks.items():
            spans = [Span(0, 0, looks[0][1].precision)]
            ran = [(step, row.precision) for step, row in looks]
            for step, precision in [*ran, (self.steps, self.afterwards[gemm])]:
                if precision == spans[-1].precision:
                    spans[-1] = spans[-1]._replace(end=step)
                elif step > spans[-1].end:
                    spans.append(Span(spans[-1].end, step, precision))
            found[gemm] = tuple(spans)
        return found

    @cached_property
    def verified(self) -> dict[Gemm, tuple[Verified, ...]]:
        """What was compared with high-precision products, for each product."""
        return {
            gemm: tuple(
                Verified(step, row.precision, _or_nan(row.predicted_db), _or_nan(row.measured_db), row.is_hit)
                for step, row in looks
                if row.is_hit is not None
            )
            for gemm, looks in self.looks.items()
        }

    @property
    def compared(self) -> list[Verified]:
        """Those of all products of which both ratios are known."""
        return [each for checks in self.verified.values() for each in checks if not math.isnan(each.gap_db)]

    def shares(self, gemms: Iterable[Gemm] | None = None) -> dict[str, float]:
        """Share of the products' steps (`None`: of all products) at each precision of the ladder."""
        steps = dict.fromkeys(self.settings.ladder, 0)
        for gemm in self.looks if gemms is None else gemms:
            for span in self.spans[gemm]:
                steps[span.precision] += span.end - span.start
        total = sum(steps.values())
        return {name: count / total if total else 0.0 for name, count in steps.items()}

    def changes(self, gemm: Gemm) -> int:
        """How often the product went to another precision."""
        return len(self.spans[gemm]) - 1


def short_names(layers: Sequence[str]) -> dict[str, str]:
    """What layers may be called on a page that shows no others.

    The number of the block and what follows it (`transformer.h.3.attn.c_attn` → `3.attn.c_attn`); where that
    is not one layer's alone, the name without the beginning that all have. Characters that cannot be printed
    are written as their escapes.
    """
    return {layer: _printable(name) for layer, name in _shortened(layers).items()}


def _printable(name: str) -> str:
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in name
    )


def _shortened(layers: Sequence[str]) -> dict[str, str]:
    found = {layer: re.sub(r"^[^0-9]*\.(?=[0-9]+\.)", "", layer) for layer in layers}
    if len(set(found.values())) == len(found):
        return found
    parts = [layer.split(".") for layer in layers]
    alike = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*(p[:-1] for p in parts), strict=False)
    )
    start = len(list(alike))
    return {layer: ".".join(names[start:]) for layer, names in zip(layers, parts, strict=True)}


def table(history: History) -> str:
    """By layer and product: shares of steps, hits, the worst prediction; a last line for all of them."""
    names = short_names(history.layers)
    ladder = history.settings.ladder
    width = max(len("layer"), *map(len, names.values())) + 2
    shares = "".join(name.rjust(9) for name in ladder)
    lines = [
        f"{history.folder}: {len(history.looks)} products, {history.steps:,} steps, a look every "
        f"{history.settings.every}",
        "share of steps at each precision; gap: measured less predicted SNR, the worst one",
        "layer".ljust(width)
        + "product".ljust(13)
        + shares
        + "changes".rjust(9)
        + "hits".rjust(17)
        + "gap".rjust(21),
    ]
    last = ""
    for gemm in history.looks:
        heading = "" if gemm.layer == last else names[gemm.layer]
        lines.append(_line(history, [gemm], heading.ljust(width) + gemm.product.ljust(13)))
        last = gemm.layer
    lines.append(_line(history, list(history.looks), "all".ljust(width + 13)))
    few = share_of_few_bits(history.shares())
    lines.append(f"{100 * few:.1f} % of products × steps at {FEW_BITS} bits or fewer" + _accuracy(history))
    return "\n".join(lines)


def _line(history: History, gemms: Sequence[Gemm], start: str) -> str:
    shares = history.shares(gemms).values()
    checks = [check for gemm in gemms for check in history.verified[gemm]]
    hits = f"{sum(check.is_hit for check in checks):,} of {len(checks):,}" if checks else "-"
    gaps = [(check.gap_db, check.step) for check in checks if not math.isnan(check.gap_db)]
    worst = "-"
    if gaps:
        gap, step = max(gaps, key=lambda pair: abs(pair[0]))
        worst = f"{gap:+.1f} dB, step {step}"
    changes = sum(history.changes(gemm) for gemm in gemms)
    return start + "".join(f"{100 * share:7.1f} %" for share in shares) + f"{changes:9}{hits:>17}{worst:>21}"


def _accuracy(history: History) -> str:
    compared = history.compared
    if not compared:
        return "; nothing was verified at fewer bits"
    near = sum(abs(check.gap_db) <= NEAR_DB for check in compared) / len(compared)
    return f"; {100 * near:.1f} % of {len(compared):,} predictions within {NEAR_DB:g} dB of what was measured"


def read_history(run_dir: Path) -> History:
    """Read a run's folder; the run may be going on.

    Args:
        run_dir: holds config.json, speculation.jsonl and, once the run has ended, summary.json.

    Raises:
        UserError: a file is missing, damaged or says something that cannot be.
    """
    config, path = run_dir / "config.json", run_dir / FILE
    if not config.is_file():
        raise UserError(f"{run_dir} holds no run (no config.json): name the folder that a run has written")
    block = read_json_object(config).get("megalowbit")
    section = block.get("speculation") if isinstance(block, dict) else None
    if section is None:
        raise UserError(
            f"the run in {run_dir} did not speculate: start one with a megalowbit.speculation section"
        )
    try:
        settings = SpeculationSettings.model_validate(section)
    except ValidationError as error:
        where = f"{config}: megalowbit.speculation"
        raise invalid_settings(error, where, SpeculationSettings) from None
    looks, afterwards = _read_looks(path, settings.ladder)
    steps = max(rows[-1][0] for rows in looks.values())
    summary = run_dir / "summary.json"
    if summary.exists():  # of an earlier end, where the run was resumed and is going on
        steps = max(steps, _steps_of(summary))
    return History(folder=run_dir, settings=settings, steps=steps, looks=looks, afterwards=afterwards)


def _read_looks(
    path: Path, ladder: tuple[str, ...]
) -> tuple[dict[Gemm, tuple[tuple[int, GemmRow], ...]], dict[Gemm, str]]:
    """Looks of each product, and at which precision it runs after the last of them."""
    found: dict[Gemm, list[tuple[int, GemmRow]]] = {}
    afterwards: dict[Gemm, str] = {}
    if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
        raise UserError(f"{path} is no regular file: name another run")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    break  # torn by a kill, or still being written
                try:
                    step, row, following = _row(line, ladder)
                    gemm = Gemm(row.layer, row.product)
                    rows = found.setdefault(gemm, [])
                    _check(not rows or rows[-1][0] < step, f"step {step} does not come after the one before")
                except ValueError as error:
                    raise UserError(
                        f"{path} line {number} is damaged: {error}: mend or remove that line, or name "
                        "another run"
                    ) from None
                rows.append((step, row))
                afterwards[gemm] = following
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the run has not come to its first look yet") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): name another run") from None
    if not found:
        raise UserError(f"{path} is empty: the run has not come to its first look yet")
    layers = list(dict.fromkeys(gemm.layer for gemm in found))
    place = {layer: number for number, layer in enumerate(layers)}
    order = sorted(found, key=lambda gemm: (place[gemm.layer], PRODUCTS.index(gemm.product)))
    return {gemm: tuple(found[gemm]) for gemm in order}, afterwards


def _row(line: str, ladder: tuple[str, ...]) -> tuple[int, GemmRow, str]:
    """Step, row and next precision of a line."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets beyond the stack
        raise ValueError("it is not JSON") from None
    _check(isinstance(record, dict), "it is not an object")
    missing = [key for key in ("step", *ROW_KEYS, "next_precision") if key not in record]
    _check(not missing, f"{', '.join(missing)} is missing")
    checks: dict[str, Callable[[Any], bool]] = {
        "step": lambda value: type(value) is int and 1 <= value <= MOST_STEPS,
        "layer": lambda value: isinstance(value, str) and bool(value),
        "product": lambda value: value in PRODUCTS,
        "precision": lambda value: value in ladder,
        "next_precision": lambda value: value in ladder,
        "is_hit": lambda value: value is None or type(value) is bool,
        "reason": lambda value: isinstance(value, str),
        **dict.fromkeys(DECIBELS, lambda value: _is_null_or_within(value, -MOST_DB, MOST_DB)),
        **dict.fromkeys(RATIOS, lambda value: _is_null_or_within(value, 0, math.inf)),
    }
    for key, is_right in checks.items():
        _check(is_right(record[key]), f"{key} = {shown(record[key])} is not possible")
    is_judged = record["is_hit"] is not None
    _check(
        not is_judged or record["measured_db"] is not None,
        f"is_hit = {record['is_hit']} without a measured_db is not possible",
    )
    row = GemmRow(**{key: record[key] for key in ROW_KEYS})
    return record["step"], row, record["next_precision"]


def _steps_of(summary: Path) -> int:
    steps = read_json_object(summary).get("steps")
    if type(steps) is not int or not 0 <= steps <= MOST_STEPS:
        raise UserError(f"{summary}: steps = {shown(steps)} is not a number of steps: name another run")
    return steps


def _is_null_or_within(value: Any, low: float, high: float) -> bool:
    return value is None or (is_finite_number(value) and low <= value <= high)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)
