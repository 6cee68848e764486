"""Templates that are scripts themselves: `{{name}}` stands for a value, and a line without one is left out.

    #SBATCH --partition={{partition}}       left out where the value is None
    export {{environment}}                  once for each element of a list
    #: for readers of the template          left out always

That is all: no conditions and no loops, so that a template reads like the script it becomes. Values come
quoted for the place where they stand; nothing is quoted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megalowbit.errors import unknown_name

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
NOTE = "#:"

Value = str | Sequence[str] | None


def fill(template: str, values: Mapping[str, Value]) -> str:
    """Put values in their places.

    Args:
        template: the text.
        values: by name; of lists, one at most in a line.

    Raises:
        UserError: the template names a value that there is not.
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
    # all at once: what a value says is never looked at for placeholders
    return PLACEHOLDER.sub(lambda match: texts[match[1]], line)
