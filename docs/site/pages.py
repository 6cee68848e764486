"""A Sphinx extension: what the pages mean in the site beyond what they show on a repository viewer.

- The lists of docs/index.md become the navigation, one group for each heading.
- docs/decisions/README.md lists the decisions, in their order.
- In docs/api.md, the entry of a public name is followed by its signature and docstring.
- An HTML anchor at the beginning of a paragraph is a target that links are checked against.
- Docstrings are changed from Markdown's backticks to those of reStructuredText.
- A link to a folder leads to the folder's README.md, if it has one; otherwise it is plain text.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pictures
from sphinx.application import Sphinx

import megalowbit

ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#:]+\.md)\)", re.MULTILINE)
PUBLIC_NAME = re.compile(r"^- `mlb\.(\w+)`.*$", re.MULTILINE)
LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)\)")
HTML_ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>', re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def toctree(caption: str, entries: list[tuple[str, str]]) -> str:
    """A hidden toctree: Sphinx's name for a part of the navigation."""
    lines = "\n".join(f"{title} <{page}>" for title, page in entries)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def with_navigation(text: str) -> str:
    """docs/index.md with a toctree for each of its headings."""
    groups = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    named = zip(groups[::2], groups[1::2], strict=True)
    return text + "\n" + "\n".join(toctree(caption, ENTRY.findall(lists)) for caption, lists in named)


def with_decisions(text: str) -> str:
    """docs/decisions/README.md with all decisions."""
    return text + "\n```{toctree}\n:glob:\n:maxdepth: 1\n\n0*\n```\n"


def with_docstrings(text: str) -> str:
    """docs/api.md with the signature and docstring of each public name, instead of its line in a list."""

    def directive(found: re.Match) -> str:
        kind = "class" if inspect.isclass(getattr(megalowbit, found[1])) else "function"
        return f"```{{eval-rst}}\n.. auto{kind}:: megalowbit.{found[1]}\n```\n"

    return PUBLIC_NAME.sub(directive, text)


def as_rst(text: str) -> str:
    """A docstring, whose backticks are Markdown's, for Sphinx, which reads reStructuredText."""

    def literal(found: re.Match) -> str:
        code = " ".join(found[1].split())  # a span may go over the end of a line
        return f"``{code}``\\ {found[2]}" if found[2] else f"``{code}``"

    def in_prose(prose: str) -> str:
        parts = re.split(r"(``[^`]+``(?:\\ \w)?)", CODE.sub(literal, prose))
        return "".join(part if part.startswith("``") else re.sub(r"\*(?=\S)", r"\*", part) for part in parts)

    parts = FENCE.split(text)
    return "".join(code_block(part) if part.startswith("```") else in_prose(part) for part in parts)


def code_block(fence: str) -> str:
    """A Markdown fence as a directive of reStructuredText, Python unless the fence names a language."""
    first, *lines, _ = fence.split("\n")
    indented = "".join(f"    {line}\n" if line.strip() else "\n" for line in lines)
    return f".. code-block:: {first.strip('` ') or 'python'}\n\n{indented}"


def read_docstring(
    _app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Change a docstring before Sphinx parses it."""
    lines[:] = as_rst("\n".join(lines)).split("\n")


def without_folder_links(text: str, folder: Path) -> str:
    """Links to folders lead to their README.md, or are plain text: Sphinx has no page for a folder."""

    def replaced(found: re.Match) -> str:
        target = folder / found[2]
        if not target.is_dir():
            return found[0]  # of a page or a file, which Sphinx looks for
        page = f"{found[2].rstrip('/')}/README.md"
        return f"[{found[1]}]({page})" if (folder / page).exists() else found[1]

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


SPECIAL = {
    "docs/index": with_navigation,
    "docs/decisions/README": with_decisions,
    "docs/api": with_docstrings,
}


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Change the text of a page before Sphinx parses it."""
    text = without_folder_links(source[0], (Path(app.srcdir) / page).parent)
    text = HTML_ANCHOR.sub(r"(\1)=\n", text)
    source[0] = SPECIAL.get(page, str)(text)


def write_entrance(app: Sphinx, failure: Exception | None) -> None:
    """index.html of the site leads to that of docs/."""
    if failure is None:
        target = f"{app.config.root_doc}.html"
        text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        text += f'<title>{app.config.project}</title><a href="{target}">{app.config.project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Draw the pictures and connect the functions above; Sphinx calls it at the start of a build."""
    pictures.write()
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
    app.connect("build-finished", write_entrance)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
