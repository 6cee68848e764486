import errno

import pytest
from pydantic import BaseModel, Field, ValidationError

from megalowbit.errors import (
    TransientError,
    UserError,
    from_system,
    invalid_settings,
    shown,
    unknown_name,
)


def test_unknown_name_names_the_value_the_nearest_and_all_known():
    error = unknown_name("recipe", "nvpf4", ["bf16", "nvfp4"])
    assert str(error) == "unknown recipe 'nvpf4': did you mean 'nvfp4'? known: bf16, nvfp4"


def test_unknown_name_makes_no_wild_guess():
    assert "did you mean" not in str(unknown_name("recipe", "zzz", ["bf16", "nvfp4"]))


def test_the_sections_of_a_key_make_no_name_nearer():
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
def test_a_full_disk_stays_full_and_a_server_that_is_away_comes_back(number, kind):
    error = from_system("x cannot be written", OSError(number, "why"))
    assert type(error) is kind
    assert str(error) == "x cannot be written"
    assert type(from_system("x", RuntimeError())) is UserError
