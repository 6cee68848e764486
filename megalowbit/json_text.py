"""JSON and other small texts that a person or another program wrote: read and parsed, or refused in one line.

`json.loads` fails in four ways (wrong syntax, wrong encoding, nesting beyond the stack, integers beyond
Python's limit of digits) and lets pass what other readers of the file refuse or read otherwise: `NaN`, and
two values for one key. Reading can wait for ever (a FIFO) or fill the memory (a device, a huge file), so only
regular files up to a limit are read. Text is UTF-8; a byte order mark at its start, as Windows editors write
it, is accepted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError, file_system_error, shown

LARGEST_TEXT = 64 * 2**20  # bytes
MOST_LEVELS = 100  # of nesting: code that follows the levels by recursion stays within the stack
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotJsonError(UserError):
    """The text does not follow the grammar of JSON."""


def parse_json(text: str, where: str, *, first_line: int = 1, is_strict: bool = False) -> Any:
    """The value that `text` spells.

    Args:
        text: one JSON value.
        where: what it was read from, opens the messages.
        first_line: number of the text's first line in there.
        is_strict: refuse keys that occur twice in one object, NaN, Infinity, and numbers that a float takes
            for infinite.

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
    if text.count("[") + text.count("{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
        raise UserError(f"{place} is nested too deeply: give JSON of a few levels")
    return value


def read_text(path: Path, *, largest: int = LARGEST_TEXT) -> str:
    """The text of a regular file of `largest` bytes at most; links are followed.

    Raises:
        OSError: it is missing, a folder, or cannot be read.
        UserError: it is a FIFO, a socket or a device, is larger, or is not UTF-8.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise UserError(f"{path} is {KINDS.get(kind, 'no file')}: name a regular file")
    # not blocking: what was a file may have become a FIFO
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UserError(
            f"{path} has more than {largest:,} bytes, which is too much to be right: name another"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None


def refuse_irregular_files(what: str, folder: Path, *below: str) -> None:
    """For folders whose files others open, and might wait for or read without an end; nothing is opened here.

    `what` the files are opens the messages. Looked into are the folder, and the folders in it named `below`.

    Raises:
        UserError: a FIFO, a socket, a device or a link to one lies there; or a folder cannot be listed.
    """
    for place in (folder, *(folder / name for name in below if (folder / name).is_dir())):
        try:
            kinds = {path: stat.S_IFMT(path.stat().st_mode) for path in place.iterdir() if path.exists()}
        except OSError as error:
            message = f"{what} folder {place} cannot be read ({error.strerror}): name another"
            raise file_system_error(message, error) from error
        for path, kind in sorted(kinds.items()):
            if kind in KINDS:
                raise UserError(
                    f"{what} file {path} is {KINDS[kind]}: remove it, or put a regular file there"
                )


def read_json_object(path: Path, *, is_strict: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `is_strict` as for `parse_json`.

    Raises:
        UserError: the file cannot be read (`read_text`), is not JSON, or holds something else.
    """
    try:
        text = read_text(path)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}; give an existing JSON file"
        raise file_system_error(message, error) from None
    value = parse_json(text, str(path), is_strict=is_strict)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object: write one object {{…}}")
    return value


def is_finite_number(value: object) -> bool:
    """Whether a parsed value is a number that a float can hold: not `true`, NaN or 400 digits long."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _levels(value: Any) -> int:
    """How deep lists and objects are nested, up to one more than is allowed."""
    levels, layer = 0, [value]
    while layer and levels <= MOST_LEVELS:
        containers = [each for each in layer if isinstance(each, (list, dict))]
        levels += bool(containers)
        layer = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (list, dict))
        ]
    return levels


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


def _refuse_constant(name: str) -> float:
    raise UserError(f"{name} is not a JSON number: write a finite number")
