"""`UserError`, the exception for mistakes a user can fix, and `TransientError`, for faults that may pass.

Every other exception is a bug and keeps its traceback. The command lines print a `UserError` as a single line
and exit with code 2, or with 75 if a retry may help. The message must therefore be complete: it names the
thing, its value and the remedy. If several mistakes are found at once (`Problems`), each has its own line.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


EXIT_USER_ERROR = 2  # a retry fails again
EXIT_TRANSIENT = 75  # EX_TEMPFAIL of sysexits.h: a retry may help
TRANSIENT_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.EHOSTDOWN,
    errno.ENOTCONN,
}
# Kinds of faults that end a run; stable, they are in attempts.jsonl. A rank does not answer; its main thread
# does not move, moves too slowly, or has left training; all ranks wait in one collective, or in several
# places; a rank has raised an exception; SIGTERM came and no step ended; the launcher has ended.
FAULTS = LOST, HUNG, SLOW, LEFT, NO_DATA, NO_PROGRESS, FAILED, OVERDUE, LAUNCHER = (
    "lost", "hung", "slow", "left", "no data", "no progress", "failed", "overdue", "launcher",
)  # fmt: skip
LONGEST_REASON = 400  # characters of another library's message
LONGEST_VALUE = 80  # characters of a value quoted in a message
SEPARATOR = "\n  - "  # precedes each of several mistakes in one message
MOST_LISTED = 30  # of more names, only the nearest one is printed


class UserError(ValueError):
    """A wrong name, value, file or combination, with the remedy in its message.

    Attributes:
        is_on_all_ranks: every rank of the job raises the same error, so only rank 0 prints it.
        is_reported: another rank, not necessarily rank 0, already prints it.
        run_folder: folder of the run that it has ended, if that has records to diagnose.
    """

    is_on_all_ranks: bool = False
    is_reported: bool = False
    run_folder: Path | None = None

    @property
    def is_told(self) -> bool:
        """The former name of `is_reported`."""
        return self.is_reported


class TransientError(UserError):
    """A fault that may be gone at the next attempt: a lost rank, a network failure. Exit code 75.

    Attributes:
        fault: what kind of fault ends a run, one of `FAULTS`; None: another one. Recorded in attempts.jsonl.
        culprit: who is at fault, as the message names it: `"rank 1 (host n2)"`; None: nobody is named.
    """

    def __init__(self, message: str = "", *, fault: str | None = None, culprit: str | None = None) -> None:
        super().__init__(message)
        self.fault, self.culprit = fault, culprit


class DivergenceError(UserError):
    """A run ends because losses or gradients are not finite, or as its loss guard says. Exit code 2."""


class Problems:
    """Collects mistakes that are found one by one and reports them together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect a `UserError` raised in the block; other exceptions and transient errors pass through."""
        try:
            yield
        except TransientError:
            raise
        except UserError as error:
            self.add(error)

    def add(self, error: UserError) -> None:
        """Add each mistake that `error` reports, unless it is there already."""
        for line in lines_of(error):
            if line not in self._lines:
                self._lines.append(line)

    def error(self) -> UserError:
        """All mistakes as one error; there must be at least one."""
        if len(self._lines) == 1:
            return UserError(self._lines[0])
        return UserError(SEPARATOR.join([f"{len(self._lines)} mistakes:", *self._lines]))

    def raise_any(self) -> None:
        if self._lines:
            raise self.error()


def lines_of(error: UserError) -> list[str]:
    """The mistakes that an error reports, one line each, with the rank or run they come from."""
    first, *others = (" ".join(part.split()) for part in str(error).split(SEPARATOR))
    if not others:
        return [first]
    where = re.sub(r"(?:^|(?<=: ))\d+ mistakes:$", "", first)  # "run 3 of the sweep: 2 mistakes:"
    return [where + line for line in others]


def printed(error: UserError) -> str:
    """The error as the command lines print it: one line, or one line per mistake."""
    parts = (" ".join(part.split()) for part in str(error).split(SEPARATOR))
    return SEPARATOR.join(parts)


def file_system_error(message: str, error: BaseException) -> UserError:
    """A `UserError` for a file system's error; transient if the cause may pass, such as a lost server."""
    may_pass = isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    return (TransientError if may_pass else UserError)(message)


def shown(value: object) -> str:
    """`repr(value)` for a message; the middle of a long one is left out."""
    try:
        text = repr(value)
    except Exception:  # some objects and very long numbers have no repr, and the message matters more
        text = f"<{type(value).__name__}>"
    return shortened(text, LONGEST_VALUE)


def shortened(text: str, longest: int = LONGEST_REASON) -> str:
    """`text` on one line, without its middle if it is long; for messages of other libraries."""
    text = " ".join(text.split()) if "\n" in text else text
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def unknown_name(what: str, value: object, known: Iterable[str], *, instead: str | None = None) -> UserError:
    """The error for a name that is not in `known`; suggests the nearest one and lists all if they are few.

    `what` is the user's term for the named thing (`"recipe"`). `instead` is suggested if no name is near.
    """
    names = list(known)
    # compare only the last part of dotted keys if all share the same section
    start, _, last = str(value).rpartition(".")
    if not (start and all(name.startswith(f"{start}.") for name in names)):
        start, last = "", str(value)
    lasts = {name.removeprefix(f"{start}."): name for name in names}
    near = [lasts[each] for each in difflib.get_close_matches(last, lasts, n=1, cutoff=0.5)]
    if not near and instead is not None:
        near = [instead]
    if near and len(names) > MOST_LISTED:
        return UserError(f"unknown {what} {shown(value)}: did you mean {near[0]!r}?")
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {what} {shown(value)}: {hint}known: {', '.join(names)}")


def invalid_settings(
    error: ValidationError, where: str, model: type[BaseModel], *, also: Iterable[str] = ()
) -> UserError:
    """Turn a pydantic `ValidationError` into one line per wrong key.

    Args:
        error: raised by `model.model_validate`.
        where: the dotted key `model` was read from (`"megalowbit"`); prefixes the key in the message.
        model: the validated model; its field names are suggested for an unknown key.
        also: further valid keys at the model's top level.
    """
    problems = Problems()
    found: dict[tuple[str, ...], ErrorDetails] = {}
    for each in error.errors():  # every branch of a union has an error: report the first
        found.setdefault(tuple(_keys_of(each["loc"], model)), each)
    missing = [path for path, each in found.items() if each["type"] == "missing"]
    for path, each in found.items():
        beside = [".".join([where, *key] if where else key) for key in missing if key[:-1] == path[:-1]]
        # an unknown key beside a missing one probably stands for it, whatever its spelling
        instead = beside[0] if len(beside) == 1 else None
        problems.add(_invalid_key(each, list(path), where, model, also, instead))
    return problems.error()


def _invalid_key(
    found: ErrorDetails,
    path: list[str],
    where: str,
    model: type[BaseModel],
    also: Iterable[str],
    instead: str | None,
) -> UserError:
    key = ".".join([where, *path]) if where else ".".join(path)
    if found["type"] == "extra_forbidden":
        siblings = _sibling_keys(model, path, where)
        if key in siblings:  # a key of another type; pydantic puts this section's type before it in `loc`
            return UserError(f"{key} does not belong to type {found['loc'][-2]!r}: remove it")
        if len(path) == 1:
            siblings += [f"{where}.{name}" if where else name for name in also]
        return unknown_name("key", key, siblings, instead=instead)
    if found["type"] == "missing":
        return UserError(f"{key} is missing: {_describe(model, path) or 'set it'}")
    if found["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_type(found, key)
    if found["type"] == "model_type":
        first = next((name for each in _models_at(model, path) for name in each.model_fields), "…")
        return UserError(
            f"{key} = {shown(found['input'])} is not valid: it is a block of keys, such as {key}.{first}"
        )
    reason = found["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return UserError(f"{key} = {shown(found['input'])} is not valid: {reason}")


def _wrong_type(found: ErrorDetails, key: str) -> UserError:
    """The error for a section whose `type` is missing or unknown."""
    if not isinstance(found["input"], Mapping):
        return UserError(f"{key} = {shown(found['input'])} is not valid: Input should be a valid dictionary")
    if found["type"] == "union_tag_not_found":
        return UserError(f"{key}.type is missing: set it")
    *others, last = found["ctx"]["expected_tags"].split(", ")
    return UserError(
        f"{key}.type = {shown(found['input']['type'])} is not valid: "
        f"Input should be {', '.join(others)} or {last}"
    )


def _keys_of(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """The keys of an error's location, without the union branches that pydantic inserts."""
    keys: list[str] = []
    models, is_tag = [model], False
    for part in location:
        if is_tag:
            is_tag = False
        elif not _is_union_branch(part):
            keys.append(str(part))
            fields = _fields_of(models, keys[-1])
            models = _below(models, keys[-1])
            is_tag = any(_has_tags(field.annotation) for field in fields)
    return keys


def _is_union_branch(part: int | str) -> bool:
    # "dict[str,any]", "literal['auto']", "str"
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models in a field's annotation."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models_in(each)]


def _fields_of(models: list[type[BaseModel]], name: str) -> list[FieldInfo]:
    return [each.model_fields[name] for each in models if name in each.model_fields]


def _below(models: list[type[BaseModel]], key: str) -> list[type[BaseModel]]:
    """The models of the section `key`; it may also name one entry of a list or an object of sections."""
    fields = _fields_of(models, key)
    return [inner for field in fields for inner in _models_in(field.annotation)] if fields else models


def _has_tags(annotation: Any) -> bool:
    """Whether a field is a union of tagged models; pydantic inserts their tag after the key."""
    is_model = get_origin(annotation) is Annotated and _models_in(get_args(annotation)[0])
    return bool(is_model) or any(map(_has_tags, get_args(annotation)))


def _sibling_fields(model: type[BaseModel], path: list[str]) -> dict[str, FieldInfo]:
    """All fields that the section of the last key of `path` may have."""
    models = _models_at(model, path[:-1])
    return {name: field for each in models for name, field in each.model_fields.items()}


def _models_at(model: type[BaseModel], path: list[str]) -> list[type[BaseModel]]:
    """The models that the section at `path` may have."""
    models = [model]
    for part in path:
        models = _below(models, part)
    return models


def _sibling_keys(model: type[BaseModel], path: list[str], where: str) -> list[str]:
    prefix = ".".join([where, *path[:-1]] if where else path[:-1])
    return [f"{prefix}.{name}" if prefix else name for name in _sibling_fields(model, path)]


def _describe(model: type[BaseModel], path: list[str]) -> str | None:
    field = _sibling_fields(model, path).get(path[-1])
    return field.description if field else None
