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


class Notice(NamedTuple):
    """One thing that the doctor says.

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


def problem(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Notice:
    """A reason not to start the run."""
    return Notice("problem", code, text, fix, tuple(hosts))


def warning(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Notice:
    """A likely mistake."""
    return Notice("warning", code, text, fix, tuple(hosts))


def note(code: str, text: str, fix: str = "", hosts: Iterable[str] = ()) -> Notice:
    """A fact that is worth knowing."""
    return Notice("note", code, text, fix, tuple(hosts))


def by_level(notices: Iterable[Notice]) -> list[Notice]:
    """The notices without repetitions, problems first; otherwise in their order."""
    return sorted(dict.fromkeys(notices), key=lambda each: LEVELS.index(each.level))


def merged(notices: Iterable[tuple[str, Notice]], num_hosts: int) -> list[Notice]:
    """One notice for all hosts that have the same one; without hosts if all have it.

    Args:
        notices: the host, and what was found there.
        num_hosts: of the job.
    """
    hosts: dict[Notice, dict[str, None]] = {}
    for host, notice in notices:
        hosts.setdefault(notice, {})[host] = None
    return [
        notice if len(where) == num_hosts else notice._replace(hosts=tuple(where))
        for notice, where in hosts.items()
    ]
