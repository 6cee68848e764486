"""Print the release notes of a version: its section of CHANGELOG.md.

python tools/release_notes.py          # of the newest version
python tools/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from megalowbit.errors import UserError, unknown_name
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.standard_streams import run_until_unread

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
HEADING = re.compile(r"^## (\S+)(?: \((.*)\))?$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """The sections of a changelog by version, newest first, without their headings.

    Raises:
        UserError: two sections have the same version.
    """
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    found: dict[str, str] = {}
    for heading, end in zip(headings, ends, strict=True):
        if heading[1] in found:
            raise UserError(f"CHANGELOG.md has two sections {heading[1]}: join them")
        found[heading[1]] = text[heading.end() : end].strip() + "\n"
    return found


def notes(version: str | None) -> str:
    """The notes of a version; None: the newest.

    Raises:
        UserError: CHANGELOG.md has no section of this version.
    """
    known = sections(CHANGELOG.read_text(encoding="utf-8"))
    chosen = next(iter(known), "") if version is None else version
    if chosen not in known:
        raise unknown_name("version", chosen, known)
    return known[chosen]


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = OneLineParser.for_script(__doc__, "tools/release_notes.py")
    parser.add_argument("version", nargs="?", metavar="VERSION", help="default: the newest")
    print(notes(parser.parse_args(arguments).version), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_until_unread(main))
