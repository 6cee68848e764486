"""How the last attempt ended: killed, out of memory, a full disk, a lost or hung rank, a stop on request.

The fault that the attempt's end names decides, or its line if it names none. An attempt that has begun, has
not ended, and whose folder nobody has locked, was killed. What killed it is not recorded anywhere in the
folder, so the finding says where to look.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megalowbit.errors import FAILED, HUNG, LAUNCHER, LEFT, LOST, NO_DATA, NO_PROGRESS, OVERDUE, SLOW
from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.run_files import RunFiles
from megalowbit.pretrain.run_folder.attempts import DEFECT as HOW_DEFECT
from megalowbit.pretrain.run_folder.attempts import FINISHED
from megalowbit.pretrain.run_folder.attempts import INTERRUPTED as HOW_INTERRUPTED
from megalowbit.pretrain.run_folder.attempts import STOPPED as HOW_STOPPED
from megalowbit.pretrain.run_folder.attempts import TRANSIENT as HOW_TRANSIENT
from megalowbit.pretrain.run_folder.folder import LOCK
from megalowbit.records.attempts import BEGUN
from megalowbit.records.files import ATTEMPTS, DONE, METRICS

OF_LIBRARIES = (None, FAILED, NO_DATA, NO_PROGRESS)  # faults whose line may quote a library: out of memory …
RESUME = "continue from the newest checkpoint: the same command with --resume auto"
DISK = re.compile(r"No space left on device|File too large|Disk quota exceeded")
MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|cannot allocate memory|MemoryError|not enough memory",
    re.IGNORECASE,
)
RANKS = r"(?P<ranks>ranks? \d[\d, …-]*(?: ?\([^)]*\))*)"
LAUNCHER_LOST = "the launcher ended while its ranks trained; they saved and ended"
# what supervision has found to be at fault: the finding's name, its title and role
OF_FAULTS: Mapping[str, tuple[str, str, base.Role]] = MappingProxyType(
    {
        LOST: (base.LOST_RANK, "{culprit} no longer answered", "cause"),
        HUNG: (base.HANG, "{culprit} hung", "cause"),
        SLOW: (base.HANG, "{culprit} did not finish in time", "cause"),
        LEFT: (base.HANG, "{culprit} left training while others went on", "symptom"),
        NO_DATA: (base.NETWORK, "no data passed between the ranks", "cause"),
        NO_PROGRESS: (base.HANG, "no rank made progress", "symptom"),
        FAILED: (base.DEFECT, "an exception on {culprit} ended the run", "cause"),
        OVERDUE: (base.OVERDUE, "SIGTERM came, and no step ended in time to save", "cause"),
        LAUNCHER: (base.LAUNCHER, LAUNCHER_LOST, "cause"),
    }
)
# Of other endings, and of all in records of versions without `fault`, the message decides: in this order,
# each with the finding's name and its title, into which the match's groups are put.
LIBRARIES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (DISK, base.DISK, "a disk was full, or a limit of file sizes was reached"),
    (MEMORY, base.MEMORY, "a process had no memory left"),
)
LINES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(rf"{RANKS} do(?:es)? not answer"), base.LOST_RANK, "{ranks} no longer answered"),
    (re.compile(r"the main process \(rank 0.*?(?:has ended|cannot be reached)"), base.LOST_RANK,
     "the main process (rank 0) was lost"),
    (re.compile(rf"{RANKS} ha(?:s|ve) hung"), base.HANG, "{ranks} hung"),
    (re.compile(rf"{RANKS} ha(?:s|ve) been working"), base.HANG, "{ranks} did not finish in time"),
    (re.compile(r"all ranks answer and have waited"), base.NETWORK, "no data passed between the ranks"),
    (re.compile(r"has lost another rank"), base.LOST_RANK, "a rank was lost at the start or end"),
    (re.compile(r"the launcher has ended before its ranks: saved"), base.LAUNCHER, LAUNCHER_LOST),
    (re.compile(r"ended by SIGTERM without a checkpoint"), base.OVERDUE,
     "SIGTERM came, and no step ended in time to save"),
    (re.compile(r"was deleted or moved while the run wrote"), base.FOLDER,
     "the run folder was deleted or moved while the run wrote to it"),
    (re.compile(r"in a row were not finite|the loss of .*(?:was not finite|has risen)|deviations above"),
     base.GUARD, "the run stopped itself because of its losses"),
)  # fmt: skip
REMEDIES = {
    base.LOST_RANK: (
        "look at the log of that rank's node: dmesg -T | grep -iE 'killed process|xid|nvlink'", RESUME,
        "if it happens on the same host again, leave the host out (sbatch --exclude=HOST)",
    ),
    base.HANG: (
        "read the stack file that the line names, and the log of that host's file system", RESUME,
        "if the step was only slow: --set megalowbit.watchdog.timeout=SECONDS",
    ),
    base.NETWORK: ("check NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and the links between the hosts", RESUME),
    base.OVERDUE: (
        RESUME,
        "give a stop more time: --set megalowbit.watchdog.termination_seconds=SECONDS, below KillWait",
    ),
    base.LAUNCHER: (
        RESUME, "see what ended it: a closed session (start runs with nohup, in tmux or as a job), kill -9, "
        "or a lack of memory (dmesg -T | grep -i 'killed process')",
    ),
    base.FOLDER: ("put a moved folder back, or continue from the checkpoint that was saved: --resume auto",),
    base.GUARD: (),
    base.REFUSED: ("do what the line says",),
    base.DEFECT: ("the traceback is in the log of that rank: it names file and line", RESUME),
    base.TRANSIENT: ("look at what the line names", RESUME),
    base.MEMORY: (
        "compare with the estimate: megalowbit pretrain --ds-config … --dry-run",
        "halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps", RESUME,
    ),
    base.DISK: (
        "free space on that file system, then " + RESUME,
        "keep fewer checkpoints: --set megalowbit.checkpoint.keep=2",
    ),
}  # fmt: skip


def findings(run: RunFiles) -> list[Finding]:
    """How the last attempt ended, and damaged checkpoints."""
    found = [*_damaged(run)]
    if not run.finish.is_final or _failed_after_the_finish(run):
        ending = _ending(run)
        if ending is not None:
            found.append(ending)
    return found


def notes(run: RunFiles) -> list[str]:
    """A note if the run has finished and its last recorded attempt did not.

    Earlier versions did not record an attempt that had only the export and `DONE` left to write.
    """
    _, ended = run.last_attempt
    how = [str(line["how"]) for line in ended if line.get("how") is not None]
    if not run.finish.is_final or not how or FINISHED in how or _failed_after_the_finish(run):
        return []
    return [
        f"{ATTEMPTS}: the last recorded attempt did not finish ({how[-1]}); {DONE} says that the run has "
        "finished since, in an attempt that is not recorded"
    ]


def _failed_after_the_finish(run: RunFiles) -> bool:
    """Whether the run had finished before its last attempt, which failed too early to remove `DONE`."""
    *_, last = [0, *(at for at, line in enumerate(run.attempts) if line["event"] == BEGUN)]
    had_finished = any(line.get("how") == FINISHED for line in run.attempts[:last])
    _, ended = run.last_attempt
    return had_finished and any(line.get("how") not in (FINISHED, None) for line in ended)


def _ending(run: RunFiles) -> Finding | None:
    begun, ended = run.last_attempt
    if run.is_running:
        return None
    if ended:
        # the main process names the rank at fault; a line of another rank counts if there is no other
        main = [line for line in ended if line.get("rank") == 0]
        return _ending_of(run, (main or ended)[-1], ended)
    if run.refusals:
        name, text = list(run.refusals.items())[-1]
        return Finding(
            name=base.REFUSED, step=None, title="the last attempt was refused", role="ending",
            evidence=(Evidence(file=name, text=text),),
            remedy=("do what the line says, then " + RESUME,),
        )  # fmt: skip
    return _killed(run, begun)


def _ending_of(run: RunFiles, line: dict[str, Any], ended: list[dict[str, Any]]) -> Finding | None:
    how, text, step = str(line.get("how")), str(line.get("line") or ""), _step_of(line, run)
    kind = str(line.get("error") or "")
    evidence = tuple(
        Evidence(
            file=str(each["file"]), step=_step_of(each, run), text=f"{each.get('how')}: {_message_of(each)}"
        )
        for each in ended
    )
    if how == FINISHED:
        return None
    if how == HOW_STOPPED:
        number = line.get("signal")
        return Finding(
            name=base.STOPPED, step=step, role="ending", is_failure=False, evidence=evidence,
            title=f"stopped after step {step} on request ({number or 'another rank had the signal'}): a time "
            "limit, a preemption or scancel; a checkpoint was saved",
            remedy=(RESUME,),
        )  # fmt: skip
    if how == HOW_INTERRUPTED:
        return Finding(
            name=base.INTERRUPTED, step=step, role="ending", is_failure=False, evidence=evidence,
            title=f"interrupted with Ctrl-C after step {step}", remedy=(RESUME,),
        )  # fmt: skip
    name, title, role = _failure(line, how, f"{kind} {text}")
    return Finding(
        name=name, step=step, title=f"{title}, after step {step}", role=role,
        evidence=evidence, remedy=REMEDIES[name],
    )  # fmt: skip


def _failure(line: dict[str, Any], how: str, text: str) -> tuple[str, str, base.Role]:
    """Name, title and role of the finding for an error: by its fault, or by its message."""
    fault = line.get("fault")
    known = OF_FAULTS.get(fault) if isinstance(fault, str) else None
    if known is None or fault in OF_LIBRARIES:
        for pattern, name, title in LIBRARIES:
            if pattern.search(text):
                return name, title, "cause"
    if known is not None:
        name, title, role = known
        return name, title.format(culprit=line.get("culprit") or "another rank"), role
    for pattern, name, title in LINES:
        match = pattern.search(text)
        if match is not None:
            return name, title.format(**match.groupdict()), "symptom" if name == base.GUARD else "cause"
    if how == HOW_DEFECT:
        return base.DEFECT, f"{line.get('error') or ''} ended the run", "cause"
    if re.search(r"failed in .+?: \w+(?:Error|Exception)", text):
        return base.DEFECT, "an exception ended the run", "cause"
    if how == HOW_TRANSIENT:
        return base.TRANSIENT, "a fault that may pass ended the run", "symptom"
    return base.REFUSED, "the run ended itself", "cause"


def _message_of(line: dict[str, Any]) -> str:
    text, kind = str(line.get("line") or ""), str(line.get("error") or "")
    named = kind and kind not in ("UserError", "TransientError", "DivergenceError")
    return (f"{kind}: {text}" if named else text) or str(line.get("signal") or "no more is recorded")


def _step_of(line: dict[str, Any], run: RunFiles) -> int:
    step = line.get("step")
    return step if type(step) is int else run.last_step


def _killed(run: RunFiles, begun: dict[str, Any] | None) -> Finding | None:
    planned = run.planned_steps
    if begun is None and (not len(run.metrics) or planned is None or run.last_step >= planned):
        if not len(run.metrics):
            return Finding(
                name=base.UNFINISHED, step=0, role="symptom", title="no step is recorded",
                evidence=(Evidence(file=METRICS, text="has no line"),),
                remedy=("read the log of the start: the run failed before its first step",),
            )  # fmt: skip
        return None
    last = Evidence(
        file=METRICS, step=run.last_step, text=f"the last recorded step of {planned or 'an unknown number'}"
    )
    if begun is None:
        return Finding(
            name=base.UNFINISHED, step=run.last_step, role="symptom",
            title=f"ended after step {run.last_step}; how is not known, because there is no {ATTEMPTS}",
            evidence=(last,), remedy=(RESUME, "runs of this version record how an attempt ends"),
        )  # fmt: skip
    host, job = begun.get("host"), begun.get("job")
    start = Evidence(
        file=ATTEMPTS, step=_step_of(begun, run),
        text=f"began at {_clock(begun.get('time'))} on {host}, process {begun.get('pid')}; no end is "
        "recorded",
    )  # fmt: skip
    free = Evidence(file=LOCK, text="no process holds it")
    accounting = (
        f"sacct -j {shlex.quote(str(job))} --format=JobID,State,ExitCode,MaxRSS,End says what SLURM knows"
    )
    return Finding(
        name=base.KILLED, step=run.last_step,
        title=f"killed after step {run.last_step} without a word; by what is not known: SIGKILL (the kernel "
        "when host memory is out, a scheduler, a person) or the machine went down",
        evidence=(start, last, free),
        remedy=(
            *([accounting] if job else []),
            f"on {host}: dmesg -T | grep -iE 'killed process|out of memory', and last reboot",
            RESUME,
        ),
    )  # fmt: skip


def _clock(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return "an unknown time"
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _damaged(run: RunFiles) -> list[Finding]:
    if not run.damaged_checkpoints:
        return []
    name = run.damaged_checkpoints[0]
    step = int(name.removeprefix("step-").partition(".")[0])
    evidence = tuple(
        Evidence(
            file=f"checkpoints/{each}", text="did not agree with its manifest at a resume, and was renamed"
        )
        for each in run.damaged_checkpoints
    )
    return [
        Finding(
            name=base.CHECKPOINT, step=step, evidence=evidence,
            title=f"the checkpoint of step {step} was damaged on disk; the run went back to an earlier one",
            remedy=(
                "check the disk or file system that holds the folder (dmesg, its quota, a full disk)",
                "remove the renamed folder when you no longer need it",
                "keep more than one: --set megalowbit.checkpoint.keep=3",
            ),
        )
    ]  # fmt: skip
