"""Print the completion script of a shell, which completes commands, options and files.

    eval "$(megalowbit completion bash)"
    megalowbit completion zsh > ~/.zfunc/_megalowbit

The first line completes in this shell; put it into ~/.bashrc for all. For zsh, the folder must be in fpath.
The script is made by shtab: pip install 'megalowbit[completion]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.one_line_parser import OneLineParser, printing_user_errors

SHELLS = ("bash", "zsh")


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit completion")
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """The completion script for a shell of `SHELLS`.

    Raises:
        UserError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UserError(
            "completion scripts need shtab, which is not installed: pip install 'megalowbit[completion]'"
        ) from None
    from megalowbit.commands.table import build_parser as of_all_commands

    parser = of_all_commands()
    _complete_files(parser, shtab.FILE)
    return str(shtab.complete(parser, shell))


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Let every argument that is a path be completed by the names of files."""
    for action in parser._actions:  # argparse has no public list; shtab reads the same one
        if action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                _complete_files(below, files)
