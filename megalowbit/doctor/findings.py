"""What the doctor says: problems, warnings and notes, each with a stable code.

A problem is a reason not to start the run: it would fail, lose work, or compute otherwise than configured. A
warning is a likely mistake. A note is a fact that is worth knowing. Only problems set the exit code.
`docs/doctor.md` explains every code; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

LEVELS = ("problem", "warning", "note")
SIGNS = {"problem": "✗", "warning": "!", "note": "·"}


class Finding(NamedTuple):
    """One thing found.

    Attributes:
        level: of `LEVELS`.
        code: stable name, for programs: `memory-device`.
        text: what was found, with its figures, and why it matters.
        fix: what to do, such as `--set …`; empty if there is nothing to do.
        hosts: hosts on which it was found, if not on all.
    """

    level: str
    code: str
    text: str
    fix: str = ""
    hosts: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**self._asdict(), "hosts": list(self.hosts)}

    def __str__(self) -> str:
        where = f"{', '.join(self.hosts)}: " if self.hosts else ""
        fix = f"\n    → {self.fix}" if self.fix else ""
        return f"  {SIGNS[self.level]} {where}{self.text} [{self.code}]{fix}"


def problem(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Finding:
    """A reason not to start the run."""
    return Finding("problem", code, text, fix, tuple(hosts))


def warning(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Finding:
    """A likely mistake."""
    return Finding("warning", code, text, fix, tuple(hosts))


def note(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Finding:
    """A fact that is worth knowing."""
    return Finding("note", code, text, fix, tuple(hosts))


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without repetitions, problems first; otherwise in their order."""
    return sorted(dict.fromkeys(findings), key=lambda each: LEVELS.index(each.level))


def merged(findings: Iterable[tuple[str, Finding]], num_hosts: int) -> list[Finding]:
    """One finding for all hosts that have the same one; without hosts if all have it.

    Args:
        findings: the host, and what was found there.
        num_hosts: of the job.
    """
    hosts: dict[Finding, dict[str, None]] = {}
    for host, finding in findings:
        hosts.setdefault(finding, {})[host] = None
    return [
        finding if len(where) == num_hosts else finding._replace(hosts=tuple(where))
        for finding, where in hosts.items()
    ]
