"""Precision speculation in a run: what is refused, printed, recorded and summed up of it.

The controller decides; this component asks it before and after each optimizer step and writes down what a
look has found. A look is known on all ranks alike, the main one writes it: `speculation.jsonl` has a line for
every product and look, the records of a step have facts where there was a look, and the console names a few
changes of each, misses first. Steps are counted as everywhere in a run: the first is 1.

Not covered: other settings than the run began with, see `resume`; precisions of a loop of one's own, which
makes its own `PrecisionController`.
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
from megalowbit.speculation.counters import share_of_few_bits
from megalowbit.speculation.report import Change, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import SpeculationSettings
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Facts

if TYPE_CHECKING:
    from megalowbit.layers.recipe import Recipe
    from megalowbit.speculation.controller import PrecisionController
    from megalowbit.telemetry.sinks.jsonl import JsonlFile

MOST_CHANGES_NAMED = 3  # of a look; at the first one of a run all products change
LINE_WIDTH = 100


class Speculation(Component):
    """Asks a controller for the precision of each product, step by step.

    Args:
        controller: of the run's layers.
        switch: when layers stop quantising; None: never.

    Attributes:
        controller: as given.
        look: what the last step has found; None where it did not look.
    """

    key = "speculation"
    settings_class = SpeculationSettings
    records = ("speculation.jsonl",)

    def __init__(self, controller: PrecisionController, switch: LateSwitch | None = None) -> None:
        self.controller = controller
        self.look: SpeculationReport | None = None
        self._switch = switch
        self._file: JsonlFile | None = None  # on the main process

    @classmethod
    def check_recipe(cls, settings: SpeculationSettings, recipe: Recipe) -> None:
        """Refuse a recipe whose products cannot each have a precision of their own."""
        from megalowbit.speculation.precisions import check_base

        check_base(recipe)

    @classmethod
    def build(cls, settings: SpeculationSettings, parts: RunParts) -> Speculation:
        from megalowbit.speculation.controller import PrecisionController

        controller = PrecisionController(parts.engine.module, settings)
        return cls(controller, find(parts.earlier, LateSwitch))

    def startup_line(self) -> str:
        return f"ladder    {describe_speculation(self.controller.settings)}"

    def before_step(self, step: int) -> str | None:
        """Look at the step after a late switch: totals would count what was decided before."""
        if self._switch is None or step != self._switch.step:
            return None
        self.controller.look_next()
        return line_after_switch(self._switch.recipe)

    def begin_attempt(self) -> None:
        self.controller.begin_step()

    def end_step(self) -> None:
        self.look = self.controller.end_step()

    def facts(self, known: Facts) -> Facts:
        return {} if self.look is None else look_facts(self.look, self.controller.totals())

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Write down what the step has found, and name a few changes."""
        if self.look is None:
            return ()
        if self._file is not None:
            for line in look_records(self.look):
                self._file.append(line)
        return change_lines(self.look)

    def summary(self) -> Summary:
        totals = self.controller.totals()
        return Summary(entries={"speculation": speculation_summary(totals)}, row=summary_row(totals))

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        if state is None:
            raise UserError(
                f"{source} was saved without speculation, and what its products ran in is not known: leave "
                "megalowbit.speculation out, or start from it with megalowbit.model.checkpoint"
            )
        self.controller.load_state_dict(state)

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        from megalowbit.telemetry.sinks.jsonl import JsonlFile  # it imports torch

        self._file = JsonlFile(folder / self.records[0], resume_step=resume_step)

    def close_records(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def look_records(report: SpeculationReport) -> Iterator[dict[str, Any]]:
    """Lines of `speculation.jsonl`: the fields of `GemmRow`; `next_precision` is that of the next step on."""
    after = {(change.layer, change.product): change.after for change in report.changes}
    for row in report.rows:
        following = after.get((row.layer, row.product), row.precision)
        yield {"step": step_of(report), **asdict(row), "next_precision": following}


def step_of(report: SpeculationReport) -> int:
    """The step that was looked at, as a run counts: the first is 1."""
    return report.step + 1


def describe_speculation(settings: SpeculationSettings) -> str:
    """Ladder, thresholds and rhythm on one line: `int8, bf16 at 15 dB; a look every 10 steps, …`."""
    if isinstance(settings.threshold_db, dict):
        bars = settings.threshold_db
        rungs = ", ".join(f"{rung} ≥ {bars[rung]:g} dB" if rung in bars else rung for rung in settings.ladder)
    else:
        rungs = f"{', '.join(settings.ladder)} at {settings.threshold_db:g} dB"
    often = "every step" if settings.every == 1 else f"every {settings.every} steps"
    verified = {0: "none", 1: "all"}.get(settings.verify_every, f"1 of {settings.verify_every}")
    return f"{rungs}; a look {often}, {verified} verified"


def change_lines(report: SpeculationReport) -> list[str]:
    """What to print of the changes after a look: misses first, then what got dearer; at most four lines."""
    # rolled back, gone to a dearer precision, gone to a cheaper one
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


def look_facts(report: SpeculationReport, totals: SpeculationTotals) -> Facts:
    """For the records of a step that was looked at.

    Returns:
        `speculation/share_…` of products by the precision they ran at in this step, and, over the run so far:
        `hit_rate` (`None` where nothing was verified yet), `misses` and `changes`.
    """
    return {
        **{f"speculation/share_{precision}": share for precision, share in report.shares.items()},
        "speculation/share_8bit_or_less": share_of_few_bits(report.shares),
        "speculation/hit_rate": totals.hit_rate,
        "speculation/misses": totals.misses,
        "speculation/changes": totals.changes,
    }


def speculation_summary(totals: SpeculationTotals) -> dict[str, Any]:
    """For the summary of a run: mean shares over all steps and products, and the outcome of verifications."""
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
    """For the screen: what ran at 8 bits or fewer, and how often a verified product held its threshold."""
    verified = totals.hits + totals.misses
    return (
        "low bits",
        f"{columns.percent_text(totals.share_8bit)} of products",
        "verified",
        f"{verified:,}, {columns.percent_text(totals.hit_rate)} held" if verified else "nothing",
    )


def line_after_switch(recipe: Recipe) -> str:
    """What a late switch leaves to choose; `recipe` is that with which the layers go on."""
    from megalowbit.layers.recipe import operand_quantizers
    from megalowbit.quantize.names import quantizer
    from megalowbit.speculation.precisions import PRODUCTS

    left = [
        product
        for product in PRODUCTS
        if not all(quantizer(name).is_identity for name in operand_quantizers(recipe, product))
    ]
    if not left:
        return "speculation has no product left to choose a precision for"
    return f"speculation goes on for {' and '.join(left)}"


def _change_line(step: int, change: Change, measured_db: float | None) -> str:
    foreseen = "" if change.predicted_db is None else f" at {change.predicted_db:.1f} dB"
    begin = f"step {step}: "
    reason: str = change.reason
    if reason == "missed" and measured_db is not None:
        reason += f": {measured_db:.1f} dB measured"
    end = f" {change.product} {change.before} → {change.after}{foreseen} ({reason})"
    room = LINE_WIDTH - len(begin) - len(end)
    layer = change.layer if len(change.layer) <= room else ".." + change.layer[2 - room :]
    return begin + layer + end
