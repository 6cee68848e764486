"""Fills templates: `{{name}}` is replaced by a value.

    #SBATCH --partition={{partition}}       omitted if the value is None
    export {{environment}}                  repeated for each element of a list
    #: for readers of the template          always omitted

There are no conditions and no loops, so a template reads like the script that it becomes. The caller quotes
the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megalowbit.errors import unknown_name

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
NOTE = "#:"

Value = str | Sequence[str] | None


def fill(template: str, values: Mapping[str, Value]) -> str:
    """Replace the placeholders in a template.

    Args:
        template: the text.
        values: by name; a line may contain at most one list.

    Raises:
        UserError: the template has an unknown placeholder.
    """
    filled = [line for raw in template.splitlines() for line in _fill_line(raw, values)]
    return "\n".join(filled) + "\n"


def _fill_line(line: str, values: Mapping[str, Value]) -> list[str]:
    if line.lstrip().startswith(NOTE):
        return []
    texts: dict[str, str] = {}
    lists: list[tuple[str, Sequence[str]]] = []
    for name in PLACEHOLDER.findall(line):
        if name not in values:
            raise unknown_name("placeholder", name, values)
        value = values[name]
        if value is None:
            return []
        if isinstance(value, str):
            texts[name] = value
        else:
            lists.append((name, value))
    if not lists:
        return [_replace(line, texts)]
    [(name, elements)] = lists
    return [_replace(line, {**texts, name: element}) for element in elements]


def _replace(line: str, texts: Mapping[str, str]) -> str:
    # in one pass: placeholders inside values are not replaced
    return PLACEHOLDER.sub(lambda match: texts[match[1]], line)
