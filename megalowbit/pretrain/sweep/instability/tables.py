"""The report on a study's stresses as Markdown, from the content of `instability.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MOST_WARNINGS = 3  # of a run, in the table
TROUBLED = "troubled"  # state of a diagnosis, see `findings/verdict.py`
NO_RECORDS = "no records"  # state of a run whose records were removed


def markdown(data: Mapping[str, Any]) -> str:
    """The tables: what became of each run, what warned of it, and how well each metric warns."""
    settings, runs = data["settings"], data["runs"]
    if not any(run["stress"] for run in runs):
        return "No run under stress is finished."
    said = (
        f"Broken: the loss is not finite, its mean over {settings['window']} steps is more than "
        f"{settings['rise']:g} nats above its lowest, or more than {settings['gap']:g} nats above that of "
        f"{data['baseline']} under the same stress for more than {settings['window']} steps. Cost: the loss "
        "at the end minus that of the run without stress. A warning is an alarm before that: "
        f"{settings['in_a_row']} medians of {settings['bucket']} steps in a row beyond "
        f"what unstressed runs of the recipe show. Losses are means of {settings['window']} steps."
    )
    head = ["stress", "recipe", "seed", "broken at", "at the end", "loss", "cost", "gap"]
    head += ["first alarms", "diagnose"]
    table = [head, *(_run(run) for run in runs)]
    if len({run["text"] for run in runs}) > 1:
        for row, name in zip(table, ["text", *(run["text"] for run in runs)], strict=True):
            row.insert(2, name)
    parts = ["**Stresses**", said, _lines(table), *_first(runs), "**Early warning by metric**"]
    return "\n\n".join([*parts, _lines(_metrics(data)), _diagnoses(runs)])


def _run(run: Mapping[str, Any]) -> list[str]:
    first = run["breaks"][0] if run["breaks"] else None
    at = "–" if first is None else f"{first['step']} ({first['kind']})"
    end = "intact" if first is None else "broken" if run["is_broken_at_end"] else "recovered"
    return [
        run["stress"] or f"none ({run['size']})",
        run["recipe"],
        str(run["seed"]),
        at,
        end,
        "–" if run["end_loss"] is None else f"{run['end_loss']:.3f}",
        "–" if run["cost"] is None else f"{run['cost']:+.3f}",
        "–" if run["gap"] is None else f"{run['gap']:+.3f}",
        _warnings(run),
        _diagnosis(run),
    ]


def _warnings(run: Mapping[str, Any]) -> str:
    """The earliest alarms; of a run that broke, only those before the break."""
    if run["alarms"] is None:
        return "no unstressed run"
    chosen = [each for each in run["alarms"] if each["lead"] is None or each["lead"] > 0]
    if not chosen:
        return "none"
    shown = [
        f"{each['metric']} at {each['step']}" + ("" if each["lead"] is None else f" ({each['lead']} before)")
        for each in chosen[:MOST_WARNINGS]
    ]
    more = f", {len(chosen) - MOST_WARNINGS} more" if len(chosen) > MOST_WARNINGS else ""
    return ", ".join(shown) + more


def _diagnosis(run: Mapping[str, Any]) -> str:
    """What `diagnose` names first, and its step; – if nothing."""
    found = run["diagnosis"]
    if found["state"] == NO_RECORDS:
        return NO_RECORDS
    if found["state"] != TROUBLED:
        return "–"
    return found["first"] if found["step"] is None else f"{found['first']} ({found['step']})"


def _diagnoses(runs: Sequence[Mapping[str, Any]]) -> str:
    """How often `diagnose` found something, in runs that broke and in others."""
    found, states = [], [(run["diagnosis"]["state"], bool(run["breaks"])) for run in runs]
    for are_broken, name in ((True, "runs that broke"), (False, "others")):
        here = [
            state == TROUBLED
            for state, is_broken in states
            if is_broken == are_broken and state != NO_RECORDS
        ]
        found.append(f"{sum(here)} of {len(here)} {name}")
    said = f"`megalowbit diagnose` says that something went wrong in {found[0]}, and in {found[1]}."
    missing = sum(state == NO_RECORDS for state, _ in states)
    return said + (f" Runs without records: {missing}." if missing else "")


def _first(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each stress, how many runs of each recipe broke: first the recipe that broke most often."""
    found = []
    for stress in dict.fromkeys(run["stress"] for run in runs if run["stress"]):
        steps: dict[str, list[int | None]] = {}
        for run in runs:
            if run["stress"] == stress:
                steps.setdefault(run["recipe"], []).append(
                    run["breaks"][0]["step"] if run["breaks"] else None
                )
        broken = {recipe: [step for step in own if step is not None] for recipe, own in steps.items()}
        order = sorted(
            filter(broken.get, broken),
            key=lambda recipe: (-len(broken[recipe]) / len(steps[recipe]), min(broken[recipe])),
        )
        listed = ", ".join(
            f"{recipe} {len(broken[recipe])} of {len(steps[recipe])} (from step {min(broken[recipe])})"
            for recipe in order
        )
        found.append(f"Runs that broke under {stress}: {listed or 'none'}.")
    return found


def _metrics(data: Mapping[str, Any]) -> list[list[str]]:
    rows = [["metric", "warned", "median lead", "alarms without a break", "false alarms, unstressed"]]
    for each in data["metrics"]:
        if not each["broken"] + each["intact"]:
            continue
        lead = f"{statistics.median(each['leads']):g} steps" if each["leads"] else "–"
        known = f"{each['false_alarms']} of {each['unstressed']}" if each["unstressed"] else "not known"
        rows.append(
            [
                each["metric"],
                f"{each['warned']} of {each['broken']}",
                lead,
                f"{each['alarms_without_break']} of {each['intact']}",
                known,
            ]
        )
    return rows


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
