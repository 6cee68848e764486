"""The one exception for mistakes a user can mend, and its kind for what mends itself.

Everything else that goes wrong is a defect of ours and keeps its traceback. The command lines print a
`UserError` as a single line and exit with code 2, or 75 where another try may help, so its message must stand
alone: it names the thing, its value and the remedy. Where several mistakes are found at once (`Problems`),
the message has a line for each.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


EXIT_USER_ERROR = 2  # trying again is useless
EXIT_TRANSIENT = 75  # EX_TEMPFAIL of sysexits.h: trying again may help
TRANSIENT_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.EHOSTDOWN,
    errno.ENOTCONN,
}
LONGEST_REASON = 400  # characters of another library's message
LONGEST_VALUE = 80  # characters of a value that a message repeats
SEPARATOR = "\n  - "  # before each of several mistakes in one message
MOST_LISTED = 30  # names beyond which the nearest one is told without the others


class UserError(ValueError):
    """A wrong name, value, file or combination, with the remedy in its message.

    Attributes:
        is_on_all_ranks: every rank of the job raises the same, so rank 0 alone need print it.
        is_reported: another rank prints it already, which need not be rank 0.
    """

    is_on_all_ranks: bool = False
    is_reported: bool = False


class TransientError(UserError):
    """What may be gone at the next try: a rank lost, a network cut; command lines exit with 75."""


class Problems:
    """Mistakes that are found one by one and reported together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a `UserError` of this block for later; others pass through, as do transient ones."""
        try:
            yield
        except TransientError:
            raise
        except UserError as error:
            self.add(error)

    def add(self, error: UserError) -> None:
        """Keep `error`, or each of the mistakes that it reports; what is known already is not repeated."""
        for line in lines_of(error):
            if line not in self._lines:
                self._lines.append(line)

    def error(self) -> UserError:
        """All of them as one error; there must be one at least."""
        if len(self._lines) == 1:
            return UserError(self._lines[0])
        return UserError(SEPARATOR.join([f"{len(self._lines)} mistakes:", *self._lines]))

    def raise_any(self) -> None:
        if self._lines:
            raise self.error()


def lines_of(error: UserError) -> list[str]:
    """The mistakes that an error reports, each on one line; those of another rank or run, too."""
    first, *others = (" ".join(part.split()) for part in str(error).split(SEPARATOR))
    if not others:
        return [first]
    where = re.sub(r"(?:^|(?<=: ))\d+ mistakes:$", "", first)  # "run 3 of the sweep: 2 mistakes:"
    return [where + line for line in others]


def printed(error: UserError) -> str:
    """An error as the command lines print it: one line, or one for each of several mistakes."""
    parts = (" ".join(part.split()) for part in str(error).split(SEPARATOR))
    return SEPARATOR.join(parts)


def file_system_error(message: str, error: BaseException) -> UserError:
    """What a file system's error means to the run: a full disk stays full, a server may come back."""
    may_pass = isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    return (TransientError if may_pass else UserError)(message)


def shown(value: object) -> str:
    """`repr(value)` for a message, cut in the middle if it is long."""
    try:
        text = repr(value)
    except Exception:  # some objects and very long numbers have none, and the message matters more
        text = f"<{type(value).__name__}>"
    return shortened(text, LONGEST_VALUE)


def shortened(text: str, longest: int = LONGEST_REASON) -> str:
    """`text` on one line, cut in the middle if it is long; for what another library says of a value."""
    text = " ".join(text.split()) if "\n" in text else text
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def unknown_name(what: str, value: object, known: Iterable[str]) -> UserError:
    """Build the error for a name that is not in `known`, naming the nearest one and, of short lists, all.

    `what` is what is being named, as the user would call it (`"recipe"`).
    """
    names = list(known)
    # the sections of a key, where all have the same, make none of them nearer
    start, _, last = str(value).rpartition(".")
    if not (start and all(name.startswith(f"{start}.") for name in names)):
        start, last = "", str(value)
    lasts = {name.removeprefix(f"{start}."): name for name in names}
    near = [lasts[each] for each in difflib.get_close_matches(last, lasts, n=1, cutoff=0.5)]
    if near and len(names) > MOST_LISTED:
        return UserError(f"unknown {what} {shown(value)}: did you mean {near[0]!r}?")
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {what} {shown(value)}: {hint}known: {', '.join(names)}")


def invalid_settings(
    error: ValidationError, where: str, model: type[BaseModel], *, also: Iterable[str] = ()
) -> UserError:
    """Turn a pydantic `ValidationError` into one line for each key that is wrong.

    Args:
        error: what `model.model_validate` raised.
        where: the dotted key `model` was read from (`"megalowbit"`); prefixes the key in the message.
        model: the validated model, whose field names serve for the nearest match of an unknown key.
        also: keys beside the model's fields that are valid at its top level.
    """
    problems = Problems()
    seen: set[tuple[str, ...]] = set()
    for each in error.errors():
        path = _keys_of(each["loc"], model)
        if tuple(path) not in seen:  # of a union, each branch that was tried has an error: the first will do
            seen.add(tuple(path))
            problems.add(_invalid_key(each, path, where, model, also))
    return problems.error()


def _invalid_key(
    found: ErrorDetails, path: list[str], where: str, model: type[BaseModel], also: Iterable[str]
) -> UserError:
    key = ".".join([where, *path]) if where else ".".join(path)
    if found["type"] == "extra_forbidden":
        siblings = _sibling_keys(model, path, where)
        if key in siblings:  # of another type of this section, whose name pydantic puts before the key
            return UserError(f"{key} does not belong to type {found['loc'][-2]!r}: remove it")
        if len(path) == 1:
            siblings += [f"{where}.{name}" if where else name for name in also]
        return unknown_name("key", key, siblings)
    if found["type"] == "missing":
        return UserError(f"{key} is missing: {_describe(model, path) or 'set it'}")
    if found["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_type(found, key)
    reason = found["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return UserError(f"{key} = {shown(found['input'])} is not valid: {reason}")


def _wrong_type(found: ErrorDetails, key: str) -> UserError:
    """The error for a section whose `type` is missing, or that of none of its kinds."""
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
    """The keys of an error's location, without the branches of unions that pydantic puts between them."""
    keys: list[str] = []
    models, is_tag = [model], False
    for part in location:
        if is_tag:
            is_tag = False
        elif not _is_union_branch(part):
            keys.append(str(part))
            fields = [each.model_fields[keys[-1]] for each in models if keys[-1] in each.model_fields]
            models = [inner for field in fields for inner in _models_in(field.annotation)]
            is_tag = any(_has_tags(field.annotation) for field in fields)
    return keys


def _is_union_branch(part: int | str) -> bool:
    # "dict[str,any]", "literal['auto']", "str"
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models_in(each)]


def _has_tags(annotation: Any) -> bool:
    """Whether a field is a union of models with tags, which pydantic puts after the key."""
    is_model = get_origin(annotation) is Annotated and _models_in(get_args(annotation)[0])
    return bool(is_model) or any(map(_has_tags, get_args(annotation)))


def _fields_beside(model: type[BaseModel], path: list[str]) -> dict[str, FieldInfo]:
    """All fields that the section of the last key of `path` may have."""
    models = [model]
    for part in path[:-1]:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)]
    return {name: field for each in models for name, field in each.model_fields.items()}


def _sibling_keys(model: type[BaseModel], path: list[str], where: str) -> list[str]:
    prefix = ".".join([where, *path[:-1]] if where else path[:-1])
    return [f"{prefix}.{name}" if prefix else name for name in _fields_beside(model, path)]


def _describe(model: type[BaseModel], path: list[str]) -> str | None:
    field = _fields_beside(model, path).get(path[-1])
    return field.description if field else None
