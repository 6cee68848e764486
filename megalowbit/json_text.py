"""Reads JSON and other small text files, and reports every problem as a `UserError` of one line; prints JSON.

`json.loads` fails in four ways: invalid syntax, invalid encoding, nesting that exceeds the stack, and
integers that exceed Python's limit of digits. It also accepts `NaN` and duplicate keys, which other readers
reject or interpret differently. Reading can block forever (a FIFO) or exhaust the memory (a device, a huge
file), so only regular files up to a size limit are read. Text is UTF-8; a byte order mark, which Windows
editors write, is accepted.
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
INDENT = 2  # columns a level, of JSON that is printed
MOST_LEVELS = 100  # of nesting, well within the stack for code that recurses into the value
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotJsonError(UserError):
    """The text is not valid JSON."""


def parse_json(text: str, where: str, *, first_line: int = 1, is_strict: bool = False) -> Any:
    """Parse one JSON value.

    Args:
        text: the value's text.
        where: the file or option that it was read from; messages begin with it.
        first_line: line number of the text's first line in that file.
        is_strict: reject duplicate keys in an object, NaN, Infinity, and numbers too large for a float.

    Raises:
        NotJsonError: the text is not JSON; the message has line and column of the first error.
        UserError: it is nested too deeply, has an integer of thousands of digits, or violates `is_strict`.
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
            f"{where} is not JSON: line {line}, column {error.colno}: {error.msg}: fix it"
        ) from None
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except RecursionError:
        raise UserError(f"{place} is nested too deeply: use JSON of a few levels") from None
    except ValueError:  # the only other one is Python's limit on the digits of an integer
        raise UserError(f"{place} holds an integer of thousands of digits: shorten it") from None
    if text.count("[") + text.count("{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
        raise UserError(f"{place} is nested too deeply: use JSON of a few levels")
    return value


def read_text(path: Path, *, largest: int = LARGEST_TEXT) -> str:
    """Read a regular file of at most `largest` bytes; links are followed.

    Raises:
        OSError: the file is missing, a folder, or cannot be read.
        UserError: it is a FIFO, a socket or a device, is larger, or is not UTF-8.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise UserError(f"{path} is {KINDS.get(kind, 'no file')}: name a regular file")
    # non-blocking, because the file may have been replaced by a FIFO since `stat`
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UserError(
            f"{path} has more than {largest:,} bytes, too many for a file of this kind: name another"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None


def refuse_irregular_files(what: str, folder: Path, *below: str) -> None:
    """Check a folder whose files another library will open, and could block on or read endlessly.

    No file is opened here.

    Args:
        what: kind of the files, for messages.
        folder: the folder.
        below: names of its sub-folders to check too.

    Raises:
        UserError: the folder has a FIFO, a socket, a device or a link to one, or cannot be listed.
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
    """Read the object in a JSON file; `is_strict` as for `parse_json`.

    Raises:
        UserError: the file cannot be read (see `read_text`), is not JSON, or is not an object.
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


def short_json(value: Any, *, width: int = 110) -> str:
    """JSON for people: objects and lists that fit into a line are on one, as in configs/.

    Args:
        value: what `json.dumps` accepts.
        width: columns of a line; a longer number or text is not broken.
    """
    return _short_json(json.loads(json.dumps(value)), width, before=0)


def _short_json(value: Any, width: int, *, before: int) -> str:
    """JSON whose first line follows `before` columns and whose last one a comma may follow."""
    line = json.dumps(value)
    if not value or not isinstance(value, list | dict) or before + len(line) < width:
        return line
    inner = [""] * len(value)
    if isinstance(value, dict):
        inner = [f"{json.dumps(name)}: " for name in value]
    each = value.values() if isinstance(value, dict) else value
    parts = [
        name + _short_json(part, width - INDENT, before=len(name))
        for name, part in zip(inner, each, strict=True)
    ]
    text = ("\n" + ",\n".join(parts)).replace("\n", "\n" + " " * INDENT)  # texts have "\\n" for line breaks
    return f"{line[0]}{text}\n{line[-1]}"


def is_finite_number(value: object) -> bool:
    """Whether a parsed value is a number that a float can represent: not `true`, NaN or 400 digits long."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _levels(value: Any) -> int:
    """Nesting depth of lists and objects; stops counting at one more than is allowed."""
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
