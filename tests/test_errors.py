import errno

import pytest
from pydantic import BaseModel, Field, ValidationError

from megalowbit.errors import (
    Problems,
    TransientError,
    UserError,
    file_system_error,
    invalid_settings,
    lines_of,
    printed,
    shown,
    unknown_name,
)


def test_unknown_name_names_the_value_the_nearest_and_all_known():
    error = unknown_name("recipe", "nvpf4", ["bf16", "nvfp4"])
    assert str(error) == "unknown recipe 'nvpf4': did you mean 'nvfp4'? known: bf16, nvfp4"


def test_an_unknown_name_without_a_near_match_gets_no_suggestion():
    assert "did you mean" not in str(unknown_name("recipe", "zzz", ["bf16", "nvfp4"]))


def test_suggestions_ignore_the_sections_of_a_key():
    keys = ["block.speculation.model", "block.speculation.every"]
    assert "did you mean" not in str(unknown_name("key", "block.speculation.foo", keys))
    assert "did you mean 'block.speculation.every'?" in str(
        unknown_name("key", "block.speculation.evry", keys)
    )
    # of another section the whole is compared
    assert "did you mean 'block.speculation.every'?" in str(
        unknown_name("key", "block.speculaton.every", keys)
    )


def test_a_user_error_is_a_value_error():
    with pytest.raises(ValueError, match="block_size"):
        raise UserError("block_size must be positive, not 0")


def test_a_long_value_is_shown_by_its_ends():
    assert shown("x" * 78) == repr("x" * 78)
    text = shown(["begin", "x" * 10_000, "end"])
    assert text.startswith("['begin', 'xxx")
    assert text.endswith("xxx', 'end']")
    assert len(text) == 81
    assert len(str(unknown_name("recipe", "x" * 10_000, ["bf16"]))) < 150


class Inner(BaseModel, extra="forbid", frozen=True):
    growth_interval: int = 4
    initial_scale: float = Field(default=1.0, gt=0)


class Outer(BaseModel, extra="forbid", frozen=True):
    scaler: Inner = Inner()
    steps: int = Field(description="number of optimizer steps")
    recipe: str | dict[str, str] = "bf16"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 1, "stepz": 2}, "unknown key 'block.stepz': did you mean 'block.steps'?"),
        (
            {"steps": 1, "scaler": {"growth_intervall": 2}},
            "unknown key 'block.scaler.growth_intervall': did you mean 'block.scaler.growth_interval'?",
        ),
        ({}, "block.steps is missing: number of optimizer steps"),
        ({"steps": 1, "scaler": {"initial_scale": -2}}, "block.scaler.initial_scale = -2 is not valid: "),
        ({"steps": "x" * 10_000}, "block.steps = 'xxx"),
        ({"steps": 1, "recipe": 3}, "block.recipe = 3 is not valid: "),
        (
            {"steps": 1, "scaler": "dynamic"},
            "block.scaler = 'dynamic' is not valid: it is a block of keys, such as block.scaler.growth",
        ),
    ],
)
def test_a_validation_error_becomes_one_line_with_key_value_and_remedy(data, message):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    line = str(invalid_settings(caught.value, "block", Outer))
    assert line.startswith(message)
    assert len(line) < 250
    assert "\n" not in line


def test_a_value_that_cannot_be_written_is_shown_by_its_type():
    class Odd:
        def __repr__(self):
            raise TypeError("no text")

    assert shown(Odd()) == "<Odd>"
    assert shown(10**5000) == "<int>"


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, UserError), (errno.ESTALE, TransientError)])
def test_a_full_disk_is_a_user_error_and_a_lost_server_a_transient_one(number, kind):
    error = file_system_error("x cannot be written", OSError(number, "why"))
    assert type(error) is kind
    assert str(error) == "x cannot be written"
    assert type(file_system_error("x", RuntimeError())) is UserError


def test_several_mistakes_are_one_error_with_a_line_each():
    problems = Problems()
    for text in ("a is wrong", "b\n is  wrong", "a is wrong"):
        with problems.collect():
            raise UserError(text)
    assert problems
    assert str(problems.error()) == "2 mistakes:\n  - a is wrong\n  - b is wrong"
    assert lines_of(problems.error()) == ["a is wrong", "b is wrong"]
    with pytest.raises(UserError, match="2 mistakes"):
        problems.raise_any()


def test_a_single_mistake_is_reported_unchanged():
    problems = Problems()
    problems.raise_any()
    with problems.collect():
        raise UserError("a is wrong")
    assert str(problems.error()) == "a is wrong"


def test_nested_mistakes_become_one_list():
    inner, outer = Problems(), Problems()
    for text in ("b", "c"):
        inner.add(UserError(text))
    for error in (UserError("a"), inner.error()):
        outer.add(error)
    assert lines_of(outer.error()) == ["a", "b", "c"]
    outer.add(UserError(f"run 2 of the sweep: {inner.error()}"))
    assert lines_of(outer.error())[3:] == ["run 2 of the sweep: b", "run 2 of the sweep: c"]


def test_transient_errors_and_defects_are_raised_at_once():
    for error in (TransientError("x"), ZeroDivisionError()):
        with pytest.raises(type(error)), Problems().collect():
            raise error


def test_each_mistake_is_printed_on_one_line():
    problems = Problems()
    for text in ("a\nb", "c"):
        problems.add(UserError(text))
    assert printed(problems.error()) == "2 mistakes:\n  - a b\n  - c"
    assert printed(UserError("a\n  b")) == "a b"


def test_a_validation_error_names_every_key_once():
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"scaler": {"initial_scale": -2, "x": 1}, "recipe": 3})
    lines = lines_of(invalid_settings(caught.value, "block", Outer))
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == [
        "block.scaler.initial_scale",
        "unknown key 'block.scaler.x'",
        "block.steps is missing",
        "block.recipe",
    ]


def test_the_former_name_of_is_reported_is_readable():
    error = UserError("x")
    assert error.is_told is False
    error.is_reported = True
    assert error.is_told is True


class _Switch(BaseModel, extra="forbid"):
    at: int
    scope: str = "all"


@pytest.mark.parametrize("name", ["step", "when", "att"])
def test_an_unknown_key_beside_a_missing_one_is_taken_for_it(name):
    with pytest.raises(ValidationError) as caught:
        _Switch.model_validate({name: 5})
    lines = lines_of(invalid_settings(caught.value, "late_switch", _Switch))
    assert f"unknown key 'late_switch.{name}': did you mean 'late_switch.at'?" in "\n".join(lines)
