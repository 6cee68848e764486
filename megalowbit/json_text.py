"""JSON that a person or another program wrote: parsed, or refused in one line.

`json.loads` fails in four ways (wrong syntax, wrong encoding, nesting beyond the stack, integers beyond
Python's limit of digits) and lets pass what other readers of the file refuse or read otherwise: `NaN`, and
two values for one key. Text is UTF-8; a byte order mark at its start, as Windows editors write it, is
accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError, from_system, shown

DEEPEST = 100  # levels of a configuration


class NotJsonError(UserError):
    """The text does not follow the grammar of JSON."""


def parse_json(text: str, where: str, *, first_line: int = 1, is_strict: bool = False) -> Any:
    """The value that `text` spells.

    Args:
        text: one JSON value.
        where: what it was read from, opens the messages.
        first_line: number of the text's first line in there.
        is_strict: refuse keys that occur twice in one object, NaN, Infinity, numbers that a float takes
            for infinite, and nesting that those who walk through the value could not follow.

    Raises:
        NotJsonError: with line and column of the first error.
        UserError: too deep, an integer of thousands of digits, or refused by `is_strict`.
    """
    place = where if first_line == 1 else f"{where}, line {first_line}"
    hooks: dict[str, Any] = {}
    if is_strict:
        hooks = {
            "object_pairs_hook": _without_duplicates,
            "parse_constant": _refuse_constant,
            "parse_float": _finite_float,
        }
    try:
        value = json.loads(text.removeprefix("\ufeff"), **hooks)
        if is_strict and _is_deeper(value, DEEPEST):
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise NotJsonError(
            f"{where} is not JSON: line {line}, column {error.colno}: {error.msg}: mend it"
        ) from None
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except RecursionError:
        raise UserError(f"{place} is nested too deeply: give JSON of a few levels") from None
    except ValueError:  # the only other one is Python's limit on the digits of an integer
        raise UserError(f"{place} holds an integer of thousands of digits: shorten it") from None


def read_json_object(path: Path, *, is_strict: bool = False) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        is_strict: as for `parse_json`.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or JSON, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}; give an existing JSON file"
        raise from_system(message, error) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8 JSON") from None
    value = parse_json(text, str(path), is_strict=is_strict)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object: write one object {{…}}")
    return value


def is_finite_number(value: object) -> bool:
    """Whether a parsed value is a number that a float can hold: not `true`, NaN or 400 digits long."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UserError(f"key {key!r} occurs twice in one object: remove one of them")
        result[key] = value
    return result


def _finite_float(text: str) -> float:
    value = float(text)
    if not is_finite_number(value):
        raise UserError(f"{shown(text)} is larger than any float: write a finite number")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more than so many levels; without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> float:
    raise UserError(f"{name} is not a JSON number: write a finite number")
