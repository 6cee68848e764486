"""The parser of every command line: a mistake is a `UserError` of one line, and a docstring is the help.

Importable from anywhere, and light: commands build their parsers before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import NoReturn

from megalowbit.errors import UserError


def escape_unprintable_output() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that raises `UserError` for invalid arguments."""

    @classmethod
    def for_script(cls, text: str | None, prog: str | None = None) -> OneLineParser:
        """A parser whose description is the first paragraph of a docstring; the rest are examples.

        `prog` is how the program is started; None: as the file of this process is named.
        """
        description, _, examples = str(text).partition("\n\n")
        return cls(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` instead of printing the usage."""
        raise UserError(f"{message}; see --help")
