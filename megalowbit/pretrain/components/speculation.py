"""Precision speculation in a run: what is refused, told, recorded and summed up of it.

The controller decides; the loop asks it before and after each optimizer step and hands what a look has found
to the recorder. A look is known on all ranks alike, the main one writes it: `speculation.jsonl` has a line
for every product and look, the records of a step have facts where there was a look, and the console tells a
few changes of each, misses first. Steps are counted as everywhere in a run: the first is 1.

Not covered: other settings than the run began with, see `resume`; precisions of a loop of one's own, which
makes its own `PrecisionController`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe, operand_quantizers
from megalowbit.pretrain.estimate.saved_tensors import LargestForms
from megalowbit.quantize.names import quantizer
from megalowbit.speculation.counters import share_of_few_bits
from megalowbit.speculation.precisions import PRODUCTS, check_base, quantizers_of, recipe_with
from megalowbit.speculation.report import Change, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import HIGHEST, SpeculationSettings
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.sinks.jsonl import JsonlFile

KEY = "megalowbit.speculation"
MOST_CHANGES_TOLD = 3  # of a look; at the first one of a run all products change
LINE_WIDTH = 100


class LookFile:
    """`speculation.jsonl`: an object for each product and look. Arguments as of `JsonlFile`.

    Each has the fields of `GemmRow`, what the step ran at, and `next_precision`, what follows from the next
    step on.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._file = JsonlFile(path, resume_step=resume_step)

    def write(self, report: SpeculationReport) -> None:
        """Write what a look has found; looks come in the order of their steps."""
        step = step_of(report)
        if step <= self._file.last_step:
            raise ValueError(
                f"the look of step {step} comes after that of {self._file.last_step}: steps ascend"
            )
        after = {(change.layer, change.product): change.after for change in report.changes}
        for row in report.rows:
            following = after.get((row.layer, row.product), row.precision)
            self._file.append({"step": step, **asdict(row), "next_precision": following})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def step_of(report: SpeculationReport) -> int:
    """The step that was looked at, as a run counts: the first is 1."""
    return report.step + 1


def check_speculation(settings: SpeculationSettings | None, recipe: Recipe) -> None:
    """Refuse a recipe whose products cannot each have a precision of their own.

    Raises:
        UserError: see above.
    """
    if settings is None:
        return
    try:
        check_base(recipe)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None


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
    """What to tell of the changes after a look: misses first, then what got dearer; at most four lines."""
    changes = sorted(report.changes, key=_urgency)
    measured = {(row.layer, row.product): row.measured_db for row in report.rows}
    lines = [
        _change_line(step_of(report), change, measured.get((change.layer, change.product)))
        for change in changes[:MOST_CHANGES_TOLD]
    ]
    others = Counter(change.after for change in changes[MOST_CHANGES_TOLD:])
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


def largest_forms(settings: SpeculationSettings, recipe: Recipe) -> LargestForms:
    """With what layers keep as much for backward as any choice of precisions can.

    An input is largest where `grad_weight` takes it as it is, unless it is kept anyway: then codes come on
    top. So do those of a weight, which `grad_input` may take.
    """
    widest = max((rung for rung in settings.ladder if rung != HIGHEST), key=_code_bytes, default=HIGHEST)
    return LargestForms(
        own=recipe_with(recipe, (HIGHEST, widest, HIGHEST)),
        beside=recipe_with(recipe, (HIGHEST, widest, widest)),
    )


def line_after_switch(recipe: Recipe) -> str:
    """What a late switch leaves to choose.

    Args:
        recipe: with which the layers go on.
    """
    left = [
        product
        for product in PRODUCTS
        if not all(quantizer(name).is_identity for name in operand_quantizers(recipe, product))
    ]
    if not left:
        return "speculation has no product left to choose a precision for"
    return f"speculation goes on for {' and '.join(left)}"


def _code_bytes(rung: str) -> int:
    """Of codes and scales of a weight, to compare rungs by."""
    _, operand = quantizers_of(rung, "output")
    return quantizer(operand).quantize(torch.zeros(128, 128)).nbytes


def _urgency(change: Change) -> int:
    """0: rolled back, 1: gone to a dearer precision, 2: to a cheaper one."""
    return {"missed": 0, "safe": 2}.get(change.reason, 1)


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
