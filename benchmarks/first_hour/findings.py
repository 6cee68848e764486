"""Findings: what one check of a step has measured, its limit and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.timing import GpuState  # imports torch, which the runner does not need

# "info" has no limit; "skip" could not be checked, and `note` says why
Status = Literal["pass", "warn", "fail", "info", "skip"]
STATUSES: tuple[Status, ...] = ("fail", "warn", "skip", "info", "pass")
Value = float | int | str | bool | None


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was checked, unique in its step.
        unit: of a number, with the space before it.
        limit: the limit in words, such as "≤ 65 µs"; empty if there is none.
        note: for a skipped check the reason, in a line.
        clock_mhz: of the GPU's multiprocessors during the measurement.
        power_watts: of the GPU, likewise.
    """

    check: str
    status: Status
    value: Value = None
    limit: str = ""
    note: str = ""
    clock_mhz: float | None = None
    power_watts: float | None = None
    unit: str = ""


def at_most(
    check: str, value: float, limit: float, unit: str, *, warn: float | None = None, note: str = "",
    state: GpuState | None = None,
) -> Finding:  # fmt: skip
    """Fail above `limit`, warn above `warn`; NaN fails."""
    good = value <= limit if warn is None else value <= min(warn, limit)
    status: Status = "pass" if good else "warn" if value <= limit else "fail"
    words = (
        f"≤ {number_text(limit)}{unit}"
        if warn is None
        else f"≤ {number_text(warn)}, fail > {number_text(limit)}{unit}"
    )
    return Finding(check, status, _rounded(value), words, note, *_state(state), unit)


def at_least(
    check: str, value: float, limit: float, unit: str, *, warn: float | None = None, note: str = "",
    state: GpuState | None = None,
) -> Finding:  # fmt: skip
    """Fail below `limit`, warn below `warn`; NaN fails."""
    good = value >= limit if warn is None else value >= max(warn, limit)
    status: Status = "pass" if good else "warn" if value >= limit else "fail"
    words = (
        f"≥ {number_text(limit)}{unit}"
        if warn is None
        else f"≥ {number_text(warn)}, fail < {number_text(limit)}{unit}"
    )
    return Finding(check, status, _rounded(value), words, note, *_state(state), unit)


def expect(
    check: str,
    is_good: bool,
    value: Value,
    limit: str,
    unit: str = "",
    *,
    note: str = "",
    is_hard: bool = True,
) -> Finding:
    """A condition; if it is not hard, it warns only."""
    status: Status = "pass" if is_good else "fail" if is_hard else "warn"
    return Finding(check, status, value, limit, note, unit=unit)


def info(
    check: str, value: float | str, unit: str = "", *, note: str = "", state: GpuState | None = None
) -> Finding:
    """A figure without a limit, or a fact in words."""
    shown = value if isinstance(value, str) else _rounded(value)
    return Finding(check, "info", shown, "", note, *_state(state), unit)


def skip(check: str, reason: str) -> Finding:
    """A check that cannot be made here."""
    return Finding(check, "skip", None, "", reason)


def _state(state: GpuState | None) -> tuple[float | None, float | None]:
    return (None, None) if state is None else (state.clock_mhz, state.power_watts)


def number_text(value: float) -> str:
    """Four significant digits, without an exponent from 1000 on: "123,500"."""
    number = _rounded(value)
    return f"{number:,.0f}" if 1e3 <= abs(number) < 1e15 else f"{number:.4g}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
