"""Strict types for values that a person wrote: the base class of all settings, and checks of arguments.

Pydantic alone would accept `"keep": true` as one checkpoint, because Python's `True` equals 1. Here booleans,
numbers and strings are not interchangeable, NaN and infinity are rejected, and integers must fit into 64
bits. An integer may be written as JSON allows: `200`, `200.0` or `2e2`. The exception are keys that take a
count or a fraction (`1` or `1.0`), where only the decimal point distinguishes the two.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, JsonValue, Tag, ValidationInfo, field_validator

from megalowbit.errors import UserError, shown

BLOCK = "megalowbit"  # the key of this project's block in a configuration
LARGEST = 2**63 - 1
SCALARS = frozenset({bool, int, float, str})


class SettingsModel(BaseModel):
    """Base of all sections of a configuration: frozen, strictly typed, and without unknown keys.

    Each field needs a `description`. `tools/write_reference.py` generates the tables of docs/configuration.md
    from descriptions, types, defaults, units (`unit`) and class docstrings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _has_the_right_type(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_value(value, _kinds(cls.model_fields[info.field_name or ""].annotation))

    @field_validator("*", mode="after")
    @classmethod
    def _fits_into_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError("it must fit into 64 bits")
        return value


def _type_of(section: Any) -> Any:
    return section.get("type") if isinstance(section, Mapping) else getattr(section, "type", None)


# Discriminates a union of settings by their `type`; each member is annotated with its `Tag`. A discriminator
# given by the field's name does not work: pydantic rejects it together with "before" validators.
BY_TYPE = Discriminator(_type_of)


def models_by_type(union: Any) -> dict[str, Any]:
    """The models of such a union, by tag."""
    tagged = [get_args(member) for member in get_args(union)]
    return {tag.tag: model for model, *notes in tagged for tag in notes if isinstance(tag, Tag)}


def unit(name: str) -> dict[str, JsonValue]:
    """The unit of a field, for its `json_schema_extra`; the reference of all keys shows it."""
    return {"unit": name}


def plain_value(value: Any, kinds: frozenset[Any]) -> Any:
    """Check the type of `value`, and turn 200.0 into 200 if the key only takes integers.

    Args:
        value: the value of one key. Elements of lists and objects are checked one by one.
        kinds: the types that the key takes.

    Raises:
        ValueError: `value` is a boolean, number or string and the key does not take that type.
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
    """The scalar types in an annotation: `dict[str, float] | None` → float."""
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
    """Check that an argument is an integer, Python's or another library's (numpy); booleans are rejected.

    Args:
        name: the argument's name, for the message.
        value: the argument.
        least: smallest allowed value.
        most: largest allowed value.
        other: another allowed value, for the message only.

    Raises:
        UserError: it is not an integer or out of range.
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


def require_module(model: object, function: str) -> None:
    """Check that an argument is a model.

    Args:
        model: the argument.
        function: the function that was called, for the message.

    Raises:
        UserError: it is something else, such as a name, a class or None.
    """
    import torch  # settings import this file without torch

    if isinstance(model, torch.nn.Module):
        return
    remedy = "pass a torch.nn.Module"
    if isinstance(model, str):
        remedy = f"load it first, as with AutoModelForCausalLM.from_pretrained({shown(model)})"
    elif isinstance(model, type):
        remedy = f"make one first, as with {model.__name__}(…)"
    raise UserError(f"{function} takes a model, not {shown(model)}: {remedy}")


def is_count(value: object, *, least: int = 1) -> bool:
    """Whether `value` is an integer ≥ `least` that fits into 64 bits, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def counted(number: int, noun: str) -> str:
    """`1 layer`, `2 layers`: a number and a noun whose plural ends in s, for messages."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
