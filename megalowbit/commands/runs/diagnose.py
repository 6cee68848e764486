"""Say what went wrong first in a run, with evidence and what to do.

    megalowbit diagnose runs/gpt2
    megalowbit diagnose runs/gpt2 --json

Reads the files in the run's folder only: no GPU, and no torch. Exit code 0: nothing went wrong (healthy,
still running, or stopped on request); 1: something did; 2: the folder holds no run.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

from megalowbit.findings.base import Finding
from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import HEALTHY, RUNNING, STOPPED, TROUBLED, Verdict, diagnosis_of
from megalowbit.one_line_parser import OneLineParser, printing_user_errors

EXIT_TROUBLED = 1
HEADINGS = {
    HEALTHY: "healthy: nothing in its records is unusual",
    RUNNING: "still running, and healthy so far",
    STOPPED: "nothing went wrong: the run was stopped on request",
    TROUBLED: "something went wrong",
}
WIDTH = 100
SHOWN = 6  # lines of evidence of one finding


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit diagnose")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    run = read_run(options.run)
    verdict = diagnosis_of(run)
    if options.json:
        content = {"run": str(run.folder), **verdict.to_dict()}
        print(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False))
    else:
        print(page(verdict, str(run.folder)))
    return EXIT_TROUBLED if verdict.state == TROUBLED else 0


def page(verdict: Verdict, run: str) -> str:
    """The diagnosis as text."""
    last, planned = verdict.steps
    of = f" of {planned}" if planned else ""
    but = ", but see the notes" if verdict.state == HEALTHY and verdict.notes else ""
    lines = [f"{run}: {HEADINGS[verdict.state]}{but} (step {last}{of})"]
    first = verdict.first
    if first is not None:
        known = {True: "first", False: "first; the cause is not known"}[verdict.is_cause_known]
        heading = known if first.is_failure else "ended"
        lines += ["", *_described(heading, first)]
    for heading, found in (("then, probably because of it", verdict.consequences), ("also", verdict.others)):
        for finding in found:
            lines += ["", *_described(heading, finding, is_short=heading != "also")]
    lines += [f"note: {note}" for note in ("", *verdict.notes)[1:]]
    return "\n".join(lines)


def _described(heading: str, finding: Finding, *, is_short: bool = False) -> list[str]:
    """A finding as lines; a short one without its remedies."""
    likely = "" if finding.is_shown or finding.role != "cause" else "likely, not proven: "
    where = "" if finding.step is None else f" (step {finding.step})"
    lines = [*_wrapped(f"{heading}{where}: ", f"{likely}{finding.title}")]
    shown = finding.evidence[:SHOWN]
    for evidence in shown:
        lines += _wrapped("  evidence  ", str(evidence))
    if len(finding.evidence) > len(shown):
        lines.append(f"  evidence  {len(finding.evidence) - len(shown)} more with --json")
    for number, remedy in enumerate(() if is_short else finding.remedy, start=1):
        lines += _wrapped(f"  {number}. ", remedy)
    return lines


def _wrapped(start: str, text: str) -> list[str]:
    """Lines with a hanging indent; commands are not broken within words."""
    return textwrap.wrap(
        start + text, WIDTH, subsequent_indent=" " * min(len(start), 12), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
