"""The fenced blocks and commands of all pages: README.md, CONTRIBUTING.md and docs/.

A block without a language, or `bash`, is commands; `text` is output or a layout. Other languages are Python,
JSON and YAML. Commands also stand in prose, between backticks.
"""

import re
import shlex
import textwrap
from typing import NamedTuple

from launchers import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"", "bash", "json", "python", "text", "yaml"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PROGRAMS = "megalowbit|python|torchrun|deepspeed|make|pip|accelerate|sbatch"
IN_PROSE = re.compile(rf"`((?:{PROGRAMS}) [^`]+)`")
PLACEHOLDER = re.compile(r"[…<]|\b(?:RUN|OUT|COMMAND|FOLDER)\b")  # of a form, not of a command to type


class Block(NamedTuple):
    """A fenced block; `line` is that of its first fence."""

    page: str
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """A command line as shown; one in prose may be incomplete, such as `deepspeed --hostfile`."""

    page: str
    line: int
    text: str
    is_complete: bool

    @property
    def words(self):
        """Of the shell, without the comment."""
        return shlex.split(re.sub(r"\$\(.*?\)", "substituted", self.text), comments=True)


def blocks():
    """All fenced blocks, in order."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            page = path.relative_to(ROOT).as_posix()
            found.append(Block(page, line, match[2], textwrap.dedent(match[3])))
    return found


def commands():
    """All different command lines, in order; a backslash at the end continues one on the next line."""
    found = {}
    for block in (each for each in blocks() if each.language in ("", "bash")):
        joined = re.sub(r"\\\n\s*", " ", block.text)
        for line in filter(None, map(str.strip, joined.splitlines())):
            _add(found, Command(block.page, block.line, line, True))
    for path in PAGES:
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in IN_PROSE.finditer(prose):
            line = " ".join(match[1].split())
            if not PLACEHOLDER.search(line):
                _add(found, Command(page, prose.count("\n", 0, match.start()) + 1, line, False))
    return list(found.values())


def _add(found, command):
    found.setdefault(" ".join(command.text.split("  #")[0].split()), command)
