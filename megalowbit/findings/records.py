"""Records that are gone: steps that were trained, and have no line in metrics.jsonl.

Without those lines nothing can be said about their steps, so a run that lacks them is not called healthy. How
many steps there were is known from `DONE`, summary.json and attempts.jsonl.
"""

from __future__ import annotations

from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.run_files import RunFiles
from megalowbit.records.attempts import BEGUN
from megalowbit.records.files import ATTEMPTS, DONE, METRICS, SUMMARY
from megalowbit.values import counted


def findings(run: RunFiles) -> list[Finding]:
    """One finding if lines of trained steps are missing; none while the run trains, as more are written."""
    if run.is_running:
        return []
    trained, witness = max(_trained(run), key=lambda pair: pair[0])
    steps = run.metrics.steps
    first = _first_step(run)
    present = int((steps >= first).sum())
    missing = max(trained, run.last_step) - first + 1 - present
    if missing <= 0:
        return []
    text = f"has lines of {counted(present, 'step')}, the last is {run.last_step}"
    if not len(steps):
        text = "has no line of a step" if (run.folder / METRICS).exists() else "is missing"
    more = [Evidence(file=witness, text=f"says that {counted(trained, 'step')} were trained")]
    return [
        Finding(
            name=base.RECORDS, step=None, role="symptom",
            title=f"records missing or damaged: {counted(missing, 'trained step')} of {METRICS} cannot be "
            "read, and nothing is known about them",
            evidence=(Evidence(file=METRICS, text=text), *(more if trained > run.last_step else ())),
            remedy=(
                f"look for another copy of {METRICS}: a backup, W&B or TensorBoard have the same figures",
                "check the disk or file system that holds the folder (dmesg, its quota, a full disk)",
            ),
        )
    ]  # fmt: skip


def _trained(run: RunFiles) -> list[tuple[int, str]]:
    """Numbers of trained steps, and the file that has each."""
    begun, ended = run.last_attempt
    attempted = max([line["step"] or 0 for line in (*ended, *([begun] if begun else []))], default=0)
    found = [(attempted, ATTEMPTS), (run.finish.step, DONE)]
    if run.finish.is_final or ended or begun is None:  # otherwise it may be that of an earlier attempt
        found.append((run.summary_steps, SUMMARY))
    return found


def _first_step(run: RunFiles) -> int:
    """The first step of the run; one whose first attempt continued from a checkpoint has none before it."""
    begun = [line["step"] for line in run.attempts if line["event"] == BEGUN and line["step"] is not None]
    return int(begun[0]) + 1 if begun else 1
