"""An HTML document of one file: style and script inline, everything else escaped by its maker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from megalowbit.report.drawing.heat import palette_colours

HERE = Path(__file__).parent
STYLE_FILE, SCRIPT_FILE = "style.css", "live.js"


@cache
def shared_file(name: str) -> str:
    """The text of `style.css` or `live.js`."""
    return (HERE / name).read_text(encoding="utf-8")


def document(title: str, body: str, *, is_live: bool = False) -> str:
    """The whole page.

    Args:
        title: plain text.
        body: HTML.
        is_live: whether values appear under the pointer, which needs a script; pictures do not need it.
    """
    script = f"<script>{shared_file(SCRIPT_FILE)}</script>" if is_live else ""
    colours = f' data-palette="{json.dumps(palette_colours(), separators=(",", ":"))}"' if is_live else ""
    policy = (  # nothing can be loaded from elsewhere, whatever a name or a setting contains
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{shared_file(STYLE_FILE)}</style></head>\n<body{colours}>{body}{script}</body></html>\n"
    )


def part(title: str, content: str, *, anchor: str = "") -> str:
    """A section with a heading; nothing if it has no content."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    return f"<section{name}><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def paragraphs(lines: Sequence[str], kind: str = "") -> str:
    """A paragraph for each line of plain text."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opening}{escape(line)}</p>" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """A table of plain texts that scrolls sideways where it is too wide; `kinds` are classes of the rows."""
    first = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for number, row in enumerate(rows):
        kind = f' class="{kinds[number]}"' if kinds and kinds[number] else ""
        body += f"<tr{kind}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, content: str) -> str:
    """Content that appears when its title is chosen; nothing if there is none."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""
