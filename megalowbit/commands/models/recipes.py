"""List the named recipes, or print the fields of one as JSON.

    megalowbit recipes
    megalowbit recipes metis-nvfp4

The fields are JSON on standard output; the recipe's paper, and what differs from it, are on standard error.
A recipe says which layers are quantised, to which format, and how their products are computed. A
configuration names one ("recipe": "nvfp4"), or has an object of fields over a "base". See
docs/configuration.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from importlib.resources import files

from megalowbit.errors import unknown_name
from megalowbit.one_line_parser import OneLineParser, printing_user_errors

LEAST_COLUMNS = 40  # of text beside the names, however narrow the terminal is
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit recipes")
    parser.add_argument("name", nargs="?", metavar="NAME", help="print the fields of this recipe as JSON")
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    if options.name is None:
        print("\n".join(described(columns=_columns())))
        return 0
    print(fields_of(options.name))
    for line in origin_of(options.name):
        print(line, file=sys.stderr)
    return 0


def _columns() -> int | None:
    """Of the terminal that standard output is; None: it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def described(*, columns: int | None = None) -> list[str]:
    """Each named recipe and what it is: a line each, or as many as fit it into `columns`.

    Reads the file of the recipes, because torch, which the recipes themselves need, takes seconds to import.
    """
    from megalowbit.layers.settings import DEFAULT_RECIPE

    entries = json.loads((files("megalowbit.layers") / "recipe.json").read_text(encoding="utf-8"))
    named = {entry["name"]: entry["about"] for entry in entries}
    width = max(map(len, named))
    lines = []
    for name, text in named.items():
        about = LINK.sub(r"\1", text).replace("`", "")
        default = " (the default of a run)" if name == DEFAULT_RECIPE else ""
        line, indent = f"{name:<{width}}  {about}{default}", " " * (width + 2)
        if columns is None:
            lines.append(line)
            continue
        wrapper = textwrap.TextWrapper(max(columns, len(indent) + LEAST_COLUMNS), subsequent_indent=indent)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        lines += wrapper.wrap(line)
    return lines


def fields_of(name: str) -> str:
    """The fields of a recipe as JSON, which a configuration accepts in place of the name.

    Raises:
        UserError: no recipe has this name.
    """
    from megalowbit.layers.recipe import recipes

    known = recipes()
    if name not in known:
        raise unknown_name("recipe", name, known)
    return json.dumps(known[name].to_dict(), indent=2)


def origin_of(name: str) -> list[str]:
    """Lines about a recipe's paper: its name, what differs from it, what it sets besides."""
    from megalowbit.layers.recipe import named_recipes

    named = named_recipes()[name]
    if named.source is None:
        return []
    lines = [f"paper: {named.source['title']}, arXiv:{named.source['arxiv']}"]
    lines += [f"differs: {each}".replace("`", "") for each in named.departures]
    return lines + [f"the paper also sets {json.dumps({key: each})}" for key, each in named.settings.items()]
