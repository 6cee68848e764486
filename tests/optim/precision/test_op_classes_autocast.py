import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from megalowbit.errors import invalid_settings
from megalowbit.optim.precision.op_classes import AutocastSettings, OpClasses


class Block(BaseModel):
    autocast: AutocastSettings = AutocastSettings(enabled=False)


def read(value):
    return Block.model_validate({"autocast": value}).autocast


@pytest.mark.parametrize(
    ("value", "is_enabled"),
    [(True, True), (False, False), ({}, True), ({"float32": ["gelu"]}, True), ({"enabled": False}, False)],
)
def test_autocast_may_be_a_boolean_or_a_block(value, is_enabled):
    assert read(value).enabled is is_enabled


def test_the_classes_are_the_table_with_the_changes():
    settings = read({"float32": ["gelu"], "float16": ["mean"], "promote": ["mul"]})
    assert settings.op_classes() == OpClasses.default().with_changes(
        float32=["gelu"], float16=["mean"], promote=["mul"]
    )
    assert read(True).op_classes().class_of_each() == OpClasses.default().class_of_each()


@pytest.mark.parametrize("value", [True, False, {"float32": ["gelu", "tanh"], "promote": ["matmul"]}])
def test_what_is_written_reads_back_the_same(value):
    settings = read(value)
    assert read(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"float32": ["gelo"]}, "x.autocast.float32 = ['gelo'] is not valid: unknown op 'gelo'"),
        ({"float23": ["gelu"]}, "did you mean 'x.autocast.float32'?"),
        ({"float32": "gelu"}, 'expected a list of ops, for example ["gelu"]'),
        ({"float32": [3]}, "unknown op 3"),
        ({"float32": [["gelu"]]}, "x.autocast.float32 = [['gelu']] is not valid: unknown op ['gelu']"),
        ({"float16": [{"gelu": 1}]}, "x.autocast.float16 = [{'gelu': 1}] is not valid: unknown op"),
        ({"promote": [None]}, "x.autocast.promote = [None] is not valid: unknown op None"),
        ({"promote": None}, "x.autocast.promote = None is not valid: expected a list"),
        ({"promote": {"gelu": 1}}, "x.autocast.promote = {'gelu': 1} is not valid: expected a list"),
        ({"enabled": []}, "x.autocast.enabled = []"),
        ([["gelu"]], "x.autocast = [['gelu']] is not valid: expected true, false, or ops to move"),
        ({"float32": ["gelu"], "promote": ["gelu"]}, "op 'gelu' is in float32 and in promote"),
        ({"enabled": 1}, "x.autocast.enabled = 1"),
        ("fp16", "x.autocast = 'fp16'"),
        (3, "x.autocast = 3 is not valid: expected true, false, or ops to move"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(value, message):
    with pytest.raises(ValidationError) as caught:
        Block.model_validate({"autocast": value})
    line = str(invalid_settings(caught.value, "x", Block))
    assert message in line
    assert "\n" not in line


def test_settings_load_without_torch():
    code = "import sys, megalowbit.optim.precision.op_classes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
