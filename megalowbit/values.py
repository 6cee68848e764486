"""Numbers and truth values that a person wrote: a base for settings, a check for arguments.

JSON has one kind of number and Python takes `true` for 1, so a reader that does not look keeps one checkpoint
for `"keep": true`. Here a truth value is no number and no number a truth value, a text in quotes is neither,
NaN and infinity are refused, and integers fit into 64 bits. A whole number may be written as JSON allows,
`200`, `200.0` or `2e2`, but where a share may stand in its place, which only the point tells from a number.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationInfo, field_validator

from megalowbit.errors import UserError, shown

LARGEST = 2**63 - 1
SCALARS = frozenset({bool, int, float, str})


class SettingsModel(BaseModel):
    """A section of a configuration: frozen, without unknown keys, and with values that are what they say."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_says(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_value(value, _kinds(cls.model_fields[info.field_name or ""].annotation))

    @field_validator("*", mode="after")
    @classmethod
    def _fits_into_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError("it must fit into 64 bits")
        return value


def _type_of(section: Any) -> Any:
    return section.get("type") if isinstance(section, Mapping) else getattr(section, "type", None)


# For a union of settings that differ by `type`, each annotated with its `Tag`. The field's name will not do:
# pydantic refuses it beside a validator that sees values first.
BY_TYPE = Discriminator(_type_of)


def models_by_type(union: Any) -> dict[str, Any]:
    """The models of such a union by their tags."""
    tagged = [get_args(member) for member in get_args(union)]
    return {tag.tag: model for model, *notes in tagged for tag in notes if isinstance(tag, Tag)}


def plain_value(value: Any, kinds: frozenset[Any]) -> Any:
    """`value`, a whole float as an integer where only integers are possible; other kinds are left alone.

    Args:
        value: of one key; of lists and objects each element.
        kinds: which types the key has.

    Raises:
        ValueError: it is a truth value, number or text where that is not possible.
    """
    if Any in kinds:
        return value
    if isinstance(value, list | tuple):
        return type(value)(plain_value(each, kinds) for each in value)
    if isinstance(value, Mapping):
        return {key: plain_value(each, kinds) for key, each in value.items()} if kinds <= SCALARS else value
    is_number = bool(kinds & {int, float})
    if isinstance(value, bool):
        if is_number and bool not in kinds:
            raise ValueError("write a number, not true or false")
    elif isinstance(value, str):
        if is_number and str not in kinds:
            raise ValueError("write a number, without quotes")
        if kinds == {bool}:
            raise ValueError("write true or false, without quotes")
    elif isinstance(value, int | float):
        if kinds == {bool}:
            raise ValueError("write true or false")
        if is_number:
            return _plain_number(value, kinds)
    return value


def _plain_number(value: int | float, kinds: frozenset[Any]) -> int | float:
    if float not in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if int not in kinds and isinstance(value, int) and abs(value) > LARGEST:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("it must be a finite number") from None
    return value


def _kinds(annotation: Any) -> frozenset[Any]:
    """The types that values of an annotation have: `dict[str, float] | None` → float."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin is Literal:
        return frozenset(map(type, arguments))
    if origin in (Union, types.UnionType, tuple, list):
        return frozenset().union(*(_kinds(each) for each in arguments if each is not Ellipsis))
    if origin is dict:
        return _kinds(arguments[1])
    return frozenset() if annotation is type(None) else frozenset({annotation})


def whole_number(name: str, value: object, *, least: int, most: int = LARGEST, other: str = "") -> int:
    """An argument that must be a whole number, of Python's or another library's integers; not a truth value.

    Args:
        name: of the argument, for messages.
        value: of it.
        least: the smallest that is allowed.
        most: the largest.
        other: what else is allowed, for the message.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        limits = f"≥ {least}" if most == LARGEST else f"from {least} to {most}"
        limits += f", or {other}" if other else ""
        raise UserError(f"{name} must be a whole number {limits}, not {shown(value)}")
    return number


def is_count(value: object, *, least: int = 1) -> bool:
    """Whether `value` is a whole number ≥ `least` that fits into 64 bits, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
