"""Precision speculation in a run: validation, console lines, records and summary.

The `PrecisionController` decides; this component calls it before and after each optimizer step and records
the results of each precision check. Results are identical on all ranks, and the main process writes them:
`speculation.jsonl` has a line for each product of each check, `metrics.jsonl` has additional facts in steps
with a check, and the console shows a few changes of each check, misses first. Steps are counted from 1, as
everywhere in a run.

Not here: settings that differ from those the run started with (see `resume`), and custom training loops,
which create their own `PrecisionController`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, Summary, find
from megalowbit.pretrain.components.late_switch import LateSwitch
from megalowbit.records.files import CHECKS
from megalowbit.speculation.counters import share_of_few_bits
from megalowbit.speculation.report import Change, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import SpeculationSettings
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Facts

if TYPE_CHECKING:
    from megalowbit.layers.recipe import Recipe
    from megalowbit.speculation.controller import PrecisionController
    from megalowbit.telemetry.sinks.jsonl import JsonlFile

MOST_CHANGES_NAMED = 3  # per check; in the first one of a run all products change
LINE_WIDTH = 100
RELIABLE_DB = 6  # what docs/speculation-noise.md says about predictions does not hold below it


class Speculation(Component):
    """Runs a `PrecisionController` in the training loop.

    Args:
        controller: the controller of the run's layers.
        switch: the late switch, after which layers run in high precision; None: none.

    Attributes:
        controller: as given.
        report: results of the last step's check; None if it had none.
    """

    key = "speculation"
    settings_class = SpeculationSettings
    description = "choose the precision of each product during the run; off unless set"
    records = (CHECKS,)

    def __init__(self, controller: PrecisionController, switch: LateSwitch | None = None) -> None:
        self.controller = controller
        self.report: SpeculationReport | None = None
        self._switch = switch
        self._file: JsonlFile | None = None  # on the main process

    @classmethod
    def check_recipe(cls, settings: SpeculationSettings, recipe: Recipe) -> None:
        """Reject a recipe for which products cannot have different precisions."""
        from megalowbit.speculation.precisions import check_base

        for each in recipe.variants:
            if each.quantizes or not recipe.quantizes:
                check_base(each)

    @classmethod
    def build(cls, settings: SpeculationSettings, parts: RunParts) -> Speculation:
        from megalowbit.speculation.controller import PrecisionController

        controller = PrecisionController(parts.engine.module, settings)
        return cls(controller, find(parts.earlier, LateSwitch))

    def startup_line(self) -> str:
        return f"speculate {describe_speculation(self.controller.settings)}"

    def before_step(self, step: int) -> str | None:
        """Check the step after a late switch, because decisions and totals must follow it at once."""
        if self._switch is None or step != self._switch.step:
            return None
        self.controller.check_next()
        return line_after_switch(self._switch.recipe)

    def begin_attempt(self) -> None:
        self.controller.begin_step()

    def end_step(self) -> None:
        self.report = self.controller.end_step()

    def facts(self, known: Facts) -> Facts:
        return {} if self.report is None else check_facts(self.report, self.controller.totals())

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Record the results of the step's check; returns console lines for a few changes."""
        if self.report is None:
            return ()
        if self._file is not None:
            for line in check_records(self.report):
                self._file.append(line)
        return change_lines(self.report)

    def summary(self) -> Summary:
        totals = self.controller.totals()
        return Summary(entries={"speculation": speculation_summary(totals)}, row=summary_row(totals))

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        if state is None:
            raise UserError(
                f"{source} was saved without speculation, so it does not record which precision each product "
                "used: leave megalowbit.speculation out, or start from it with megalowbit.model.checkpoint"
            )
        self.controller.load_state_dict(state)

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        from megalowbit.telemetry.sinks.jsonl import JsonlFile  # it imports torch

        self._file = JsonlFile(folder / self.records[0], resume_step=resume_step)

    def close_records(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def check_records(report: SpeculationReport) -> Iterator[dict[str, Any]]:
    """Lines of `speculation.jsonl`: the step, the fields of `GemmRow`, and the precision after the step."""
    after = {(change.layer, change.product): change.after for change in report.changes}
    for row in report.rows:
        following = after.get((row.layer, row.product), row.precision)
        yield {"step": step_of(report), **asdict(row), "next_precision": following}


def step_of(report: SpeculationReport) -> int:
    """The step of the check, counted from 1."""
    return report.step + 1


def describe_speculation(settings: SpeculationSettings) -> str:
    """Candidates, thresholds and intervals on one line: `int8, bf16 at 15 dB; check every 10 steps, …`."""
    limits = settings.threshold_db
    if isinstance(limits, dict):
        candidates = ", ".join(
            f"{name} ≥ {limits[name]:g} dB" if name in limits else name for name in settings.candidates
        )
    else:
        candidates = f"{', '.join(settings.candidates)} at {limits:g} dB"
    often = "every step" if settings.every == 1 else f"every {settings.every} steps"
    verified = {0: "none", 1: "all"}.get(settings.verify_every, f"1 of {settings.verify_every}")
    all_limits = limits.values() if isinstance(limits, dict) else [limits]
    is_low = any(limit < RELIABLE_DB for limit in all_limits)
    note = f"; unreliable below {RELIABLE_DB:g} dB" if is_low else ""
    return f"{candidates}; check {often}, {verified} verified{note}"


def change_lines(report: SpeculationReport) -> list[str]:
    """Console lines for a check's changes: misses first, then moves to higher precision; four at most."""
    # misses, then moves to a higher precision, then moves to a cheaper one
    urgency = {"missed": 0, "safe": 2}
    changes = sorted(report.changes, key=lambda change: urgency.get(change.reason, 1))
    measured = {(row.layer, row.product): row.measured_db for row in report.rows}
    lines = [
        _change_line(step_of(report), change, measured.get((change.layer, change.product)))
        for change in changes[:MOST_CHANGES_NAMED]
    ]
    others = Counter(change.after for change in changes[MOST_CHANGES_NAMED:])
    if others:
        to = ", ".join(f"{count:,} to {precision}" for precision, count in others.items())
        lines.append(f"step {step_of(report)}: and {others.total():,} more, {to}")
    return lines


def check_facts(report: SpeculationReport, totals: SpeculationTotals) -> Facts:
    """Facts for the records of a step with a check.

    Returns:
        `speculation/share_…`: share of the products at each precision in this step. `hit_rate` (`None` if
        nothing was verified yet), `misses` and `changes` are over the run so far.
    """
    return {
        **{f"speculation/share_{precision}": share for precision, share in report.shares.items()},
        "speculation/share_8bit_or_less": share_of_few_bits(report.shares),
        "speculation/hit_rate": totals.hit_rate,
        "speculation/misses": totals.misses,
        "speculation/changes": totals.changes,
    }


def speculation_summary(totals: SpeculationTotals) -> dict[str, Any]:
    """The `speculation` entry of `summary.json`: mean shares over all steps, and the verification results."""
    return {
        "share_8bit_or_less": totals.share_8bit,
        "shares": dict(totals.shares),
        "hit_rate": totals.hit_rate,
        "hits": totals.hits,
        "misses": totals.misses,
        "changes": totals.changes,
        "rollbacks": totals.rollbacks,
    }


def summary_row(totals: SpeculationTotals) -> tuple[str, str, str, str]:
    """The summary's console row: the share at 8 bits or fewer, and how many verifications were hits."""
    verified = totals.hits + totals.misses
    return (
        "low bits",
        f"{columns.percent_text(totals.share_8bit)} of products",
        "verified",
        f"{verified:,}, {columns.percent_text(totals.hit_rate)} hits" if verified else "nothing",
    )


def line_after_switch(recipe: Recipe) -> str:
    """Console line after a late switch: the products that can still be chosen; `recipe` is the new one."""
    from megalowbit.layers.layer_recipe import operand_quantizers
    from megalowbit.quantize.names import quantizer
    from megalowbit.speculation.precisions import PRODUCTS

    left = [
        product
        for product in PRODUCTS
        if not all(
            quantizer(name).is_identity
            for each in recipe.variants
            for name in operand_quantizers(each, product)
        )
    ]
    if not left:
        return "speculation has no product left to choose a precision for"
    return f"speculation continues for {' and '.join(left)}"


def _change_line(step: int, change: Change, measured_db: float | None) -> str:
    predicted = "" if change.predicted_db is None else f" at {change.predicted_db:.1f} dB"
    begin = f"step {step}: "
    reason: str = change.reason
    if reason == "missed" and measured_db is not None:
        reason += f": {measured_db:.1f} dB measured"
    end = f" {change.product} {change.before} → {change.after}{predicted} ({reason})"
    room = LINE_WIDTH - len(begin) - len(end)
    layer = change.layer if len(change.layer) <= room else ".." + change.layer[2 - room :]
    return begin + layer + end
