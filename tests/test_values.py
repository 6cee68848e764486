import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy
import pytest
from pydantic import BaseModel, ValidationError

import megalowbit
from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.results import Recorded
from megalowbit.values import SettingsModel, is_count, whole_number


class Section(SettingsModel):
    count: int = 1
    at: int | float = 1
    share: float = 0.5
    name: str = "a"
    switch: bool = True
    choice: Literal["a", "b"] = "a"
    shares: dict[str, float] | float = 1.0
    pair: tuple[float, float] = (0.0, 1.0)
    either: bool | int | None = None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"count": True}, "write a number, not true or false"),
        ({"count": False}, "write a number, not true or false"),
        ({"at": True}, "write a number, not true or false"),
        ({"share": True}, "write a number, not true or false"),
        ({"shares": True}, "write a number, not true or false"),
        ({"shares": {"x": True}}, "write a number, not true or false"),
        ({"pair": [0, True]}, "write a number, not true or false"),
        ({"name": True}, "valid string"),
        ({"choice": True}, "Input should be 'a' or 'b'"),
        ({"switch": 1}, "write true or false"),
        ({"switch": 0.0}, "write true or false"),
        ({"switch": "yes"}, "write true or false, without quotes"),
        ({"count": "8"}, "without quotes"),
        ({"pair": ["0", 1]}, "without quotes"),
        ({"count": 1.5}, "fractional part"),
        ({"count": 2**63}, "64 bits"),
        ({"count": 1e30}, "64 bits"),
        ({"share": 10**400}, "finite number"),
        ({"share": float("nan")}, "finite number"),
        ({"at": float("inf")}, "finite number"),
        ({"pair": [0.0, float("-inf")]}, "finite number"),
        ({"extra": 1}, "not permitted"),
    ],
)
def test_a_value_of_another_kind_is_refused(values, reason):
    with pytest.raises(ValidationError, match=reason):
        Section(**values)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"count": 200.0}, 200),
        ({"count": 1e3}, 1000),
        ({"at": 1.0}, 1.0),  # a share of 1, which 1 is not
        ({"at": 1}, 1),
        ({"share": 2}, 2.0),
        ({"share": 10**30}, 1e30),
        ({"either": True}, True),
        ({"either": 3}, 3),
        ({"either": None}, None),
        ({"shares": {"x": 1}}, {"x": 1.0}),
    ],
)
def test_a_whole_number_may_have_a_point_where_only_whole_numbers_are_possible(values, kept):
    (key,) = values
    value = getattr(Section(**values), key)
    assert value == kept
    assert type(value) is type(kept)


def settings_classes():
    for module in pkgutil.walk_packages(megalowbit.__path__, "megalowbit."):
        if module.name.endswith(("settings", "config")):
            import_module(module.name)
    waiting = [BaseModel]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if (
                kind.__module__.startswith("megalowbit.")
                and kind is not SettingsModel
                and not issubclass(kind, Recorded)  # read from results, which no person writes
                and kind.__name__[0] != "_"
            ):
                yield kind


def test_every_settings_class_has_this_base():
    kinds = set(settings_classes())
    assert len(kinds) > 20
    assert [kind.__name__ for kind in kinds if not issubclass(kind, SettingsModel)] == []
    # and none lets go of it again
    for kind in kinds:
        assert kind.model_config["extra"] == "forbid"
        assert kind.model_config["frozen"]


@pytest.mark.parametrize("kind", dict.fromkeys(settings_classes()), ids=lambda kind: kind.__name__)
def test_no_number_of_any_section_accepts_true(kind):
    for name, field in kind.model_fields.items():
        text = str(field.annotation)
        is_number = ("int" in text or "float" in text) and "bool" not in text and "Settings" not in text
        if not is_number:
            continue
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({name: True})
        assert (name,) in [each["loc"][:1] for each in caught.value.errors()]


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], numpy.bool_(True), -1, 2**63])
def test_an_argument_that_is_not_a_whole_number_is_rejected(value):
    with pytest.raises(UserError, match=r"^keep must be a whole number ≥ 0, not"):
        whole_number("keep", value, least=0)


def test_an_argument_may_be_an_integer_of_another_library():
    assert whole_number("keep", numpy.int64(3), least=1) == 3
    assert type(whole_number("keep", numpy.int64(3), least=1)) is int
    with pytest.raises(UserError, match="from 1 to 4, not 5"):
        whole_number("keep", 5, least=1, most=4)


def test_there_is_no_other_settings_base():
    sources = Path(megalowbit.__file__).parent.rglob("*settings.py")
    assert [path.name for path in sources if "(BaseModel)" in path.read_text()] == []


def test_a_count_is_a_positive_whole_number_of_64_bits():
    assert [value for value in (1, 2**63 - 1) if not is_count(value)] == []
    assert [value for value in (0, -1, 2**63, 1.0, True, "1", None) if is_count(value)] == []
