"""Reads the speculation records of a run from its folder.

`speculation.jsonl` has a line for each product of each precision check. The line of step s contains the
precision that the product ran at since the check before, up to and including step s. It also contains the
predicted SNR, the measured SNR if the product was verified, and the precision after step s.

Every line is validated; a damaged file raises an error and never enters an average. Not here: writing the
file (`pretrain.components.speculation`) and pictures (`picture.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from megalowbit.errors import UserError, invalid_settings, shown
from megalowbit.json_text import is_finite_number, read_json_object
from megalowbit.records.files import CHECKS, CONFIG, SUMMARY
from megalowbit.speculation.counters import FEW_BITS, share_of_few_bits
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.report import GemmRow
from megalowbit.speculation.settings import SpeculationSettings
from megalowbit.telemetry.layer_names import short_names

NEAR_DB = 1.0  # error of a prediction that counts as accurate
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
    """Consecutive steps at one precision: those after `start`, up to and including `end`."""

    start: int
    end: int
    precision: str


class Verified(NamedTuple):
    """A verification of a product.

    Attributes:
        step: the step of the check.
        precision: the precision the product ran at.
        predicted_db: SNR predicted from that step's statistics; NaN if they were not finite.
        measured_db: measured SNR; NaN if it was not finite.
        is_hit: whether the measured SNR reached the threshold.
    """

    step: int
    precision: str
    predicted_db: float
    measured_db: float
    is_hit: bool

    @property
    def gap_db(self) -> float:
        """Measured minus predicted SNR; negative if noisier than predicted; NaN if one of them is NaN."""
        return self.measured_db - self.predicted_db


@dataclass(frozen=True, kw_only=True)
class History:
    """All precision checks of a run.

    Attributes:
        folder: the run folder.
        settings: the run's speculation settings.
        steps: number of steps of the run; while it is running, up to its last check.
        checks: for each product, the steps (counted from 1) and rows of its checks, ascending; layers in the
            model's order, products in the order output, grad_input, grad_weight.
        afterwards: the precision of each product after its last check.
    """

    folder: Path
    settings: SpeculationSettings
    steps: int
    checks: Mapping[Gemm, tuple[tuple[int, GemmRow], ...]]
    afterwards: Mapping[Gemm, str]

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the model's order."""
        return list(dict.fromkeys(gemm.layer for gemm in self.checks))

    @cached_property
    def spans(self) -> dict[Gemm, tuple[Span, ...]]:
        """The precisions of each product over time, from step 0 to `steps`, without gaps."""
        found = {}
        for gemm, rows in self.checks.items():
            spans = [Span(0, 0, rows[0][1].precision)]
            ran = [(step, row.precision) for step, row in rows]
            for step, precision in [*ran, (self.steps, self.afterwards[gemm])]:
                if precision == spans[-1].precision:
                    spans[-1] = spans[-1]._replace(end=step)
                elif step > spans[-1].end:
                    spans.append(Span(spans[-1].end, step, precision))
            found[gemm] = tuple(spans)
        return found

    @cached_property
    def verified(self) -> dict[Gemm, tuple[Verified, ...]]:
        """The verifications of each product."""
        return {
            gemm: tuple(
                Verified(step, row.precision, _or_nan(row.predicted_db), _or_nan(row.measured_db), row.is_hit)
                for step, row in rows
                if row.is_hit is not None
            )
            for gemm, rows in self.checks.items()
        }

    @property
    def compared(self) -> list[Verified]:
        """The verifications of all products for which both SNRs are known."""
        return [each for found in self.verified.values() for each in found if not math.isnan(each.gap_db)]

    def shares(self, gemms: Iterable[Gemm] | None = None) -> dict[str, float]:
        """Share of the steps of `gemms` (`None`: all products) at each candidate."""
        steps = dict.fromkeys(self.settings.candidates, 0)
        for gemm in self.checks if gemms is None else gemms:
            for span in self.spans[gemm]:
                steps[span.precision] += span.end - span.start
        total = sum(steps.values())
        return {name: count / total if total else 0.0 for name, count in steps.items()}

    def changes(self, gemm: Gemm) -> int:
        """How often the product changed its precision."""
        return len(self.spans[gemm]) - 1


def table(history: History) -> str:
    """A text table: for each product the shares of steps, hits and worst prediction; last, the totals."""
    names = short_names(history.layers)
    width = max(len("layer"), *map(len, names.values())) + 2
    shares = "".join(name.rjust(9) for name in history.settings.candidates)
    lines = [
        f"{history.folder}: {len(history.checks)} products, {history.steps:,} steps, a check every "
        f"{history.settings.every}",
        "share of steps at each precision; gap: measured minus predicted SNR, the worst one",
        "layer".ljust(width)
        + "product".ljust(13)
        + shares
        + "changes".rjust(9)
        + "hits".rjust(17)
        + "gap".rjust(21),
    ]
    last = ""
    for gemm in history.checks:
        heading = "" if gemm.layer == last else names[gemm.layer]
        lines.append(_line(history, [gemm], heading.ljust(width) + gemm.product.ljust(13)))
        last = gemm.layer
    lines.append(_line(history, list(history.checks), "all".ljust(width + 13)))
    few = share_of_few_bits(history.shares())
    lines.append(f"{100 * few:.1f} % of products × steps at {FEW_BITS} bits or fewer" + _accuracy(history))
    return "\n".join(lines)


def _line(history: History, gemms: Sequence[Gemm], start: str) -> str:
    shares = history.shares(gemms).values()
    verified = [each for gemm in gemms for each in history.verified[gemm]]
    hits = f"{sum(each.is_hit for each in verified):,} of {len(verified):,}" if verified else "-"
    gaps = [(each.gap_db, each.step) for each in verified if not math.isnan(each.gap_db)]
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
    near = sum(abs(each.gap_db) <= NEAR_DB for each in compared) / len(compared)
    return f"; {100 * near:.1f} % of {len(compared):,} predictions within {NEAR_DB:g} dB of the measured SNR"


def read_history(run_dir: Path) -> History:
    """Read a run's folder. The run may still be in progress.

    Args:
        run_dir: folder with config.json, speculation.jsonl and, once the run has ended, summary.json.

    Raises:
        UserError: a file is missing or damaged, or contains impossible values.
    """
    config, path = run_dir / CONFIG, run_dir / CHECKS
    if not config.is_file():
        raise UserError(f"{run_dir} is not a run folder (no config.json): give the folder of a run")
    block = read_json_object(config).get("megalowbit")
    section = block.get("speculation") if isinstance(block, dict) else None
    if section is None:
        raise UserError(
            f"the run in {run_dir} did not use speculation: add a megalowbit.speculation section to a run"
        )
    try:
        settings = SpeculationSettings.model_validate(section)
    except ValidationError as error:
        where = f"{config}: megalowbit.speculation"
        raise invalid_settings(error, where, SpeculationSettings) from None
    checks, afterwards = _read_checks(path, settings.candidates)
    steps = max(rows[-1][0] for rows in checks.values())
    summary = run_dir / SUMMARY
    if summary.exists():  # if the run was resumed, the summary may be that of its former end
        steps = max(steps, _steps_of(summary))
    return History(folder=run_dir, settings=settings, steps=steps, checks=checks, afterwards=afterwards)


def _read_checks(
    path: Path, candidates: tuple[str, ...]
) -> tuple[dict[Gemm, tuple[tuple[int, GemmRow], ...]], dict[Gemm, str]]:
    """The checks of each product, and its precision after the last of them."""
    found: dict[Gemm, list[tuple[int, GemmRow]]] = {}
    afterwards: dict[Gemm, str] = {}
    if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
        raise UserError(f"{path} is not a regular file: choose another run")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    break  # incomplete: the run was killed, or is writing it now
                try:
                    step, row, following = _row(line, candidates)
                    gemm = Gemm(row.layer, row.product)
                    rows = found.setdefault(gemm, [])
                    _check(not rows or rows[-1][0] < step, f"step {step} does not come after the one before")
                except ValueError as error:
                    raise UserError(
                        f"{path} line {number} is damaged: {error}: fix or remove that line, or choose "
                        "another run"
                    ) from None
                rows.append((step, row))
                afterwards[gemm] = following
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: wait for the run's first precision check") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): choose another run") from None
    if not found:
        raise UserError(f"{path} is empty: wait for the run's first precision check")
    layers = list(dict.fromkeys(gemm.layer for gemm in found))
    place = {layer: number for number, layer in enumerate(layers)}
    order = sorted(found, key=lambda gemm: (place[gemm.layer], PRODUCTS.index(gemm.product)))
    return {gemm: tuple(found[gemm]) for gemm in order}, afterwards


def _row(line: str, candidates: tuple[str, ...]) -> tuple[int, GemmRow, str]:
    """Step, row and next precision of a line."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
        raise ValueError("it is not JSON") from None
    _check(isinstance(record, dict), "it is not an object")
    missing = [key for key in ("step", *ROW_KEYS, "next_precision") if key not in record]
    _check(not missing, f"{', '.join(missing)} is missing")
    checks: dict[str, Callable[[Any], bool]] = {
        "step": lambda value: type(value) is int and 1 <= value <= MOST_STEPS,
        "layer": lambda value: isinstance(value, str) and bool(value),
        "product": lambda value: value in PRODUCTS,
        "precision": lambda value: value in candidates,
        "next_precision": lambda value: value in candidates,
        "is_hit": lambda value: value is None or type(value) is bool,
        "reason": lambda value: isinstance(value, str),
        **dict.fromkeys(DECIBELS, lambda value: _is_null_or_within(value, -MOST_DB, MOST_DB)),
        **dict.fromkeys(RATIOS, lambda value: _is_null_or_within(value, 0, math.inf)),
    }
    for key, is_right in checks.items():
        _check(is_right(record[key]), f"{key} = {shown(record[key])} is not possible")
    _check(
        record["is_hit"] is None or record["measured_db"] is not None,
        f"is_hit = {record['is_hit']} without a measured_db is not possible",
    )
    row = GemmRow(**{key: record[key] for key in ROW_KEYS})
    return record["step"], row, record["next_precision"]


def _steps_of(summary: Path) -> int:
    steps = read_json_object(summary).get("steps")
    if type(steps) is not int or not 0 <= steps <= MOST_STEPS:
        raise UserError(f"{summary}: steps = {shown(steps)} is not a number of steps: choose another run")
    return steps


def _is_null_or_within(value: Any, low: float, high: float) -> bool:
    return value is None or (is_finite_number(value) and low <= value <= high)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)
