import subprocess
import sys
from pathlib import Path

import pytest

from megalowbit.errors import UserError
from megalowbit.optim.precision.op_classes import (
    AS_GIVEN,
    CLASSES,
    FLOAT16,
    FLOAT32,
    KNOWN,
    PROMOTE,
    OpClasses,
)


def test_every_op_of_the_table_is_in_one_place():
    tables = (FLOAT16, FLOAT32, PROMOTE, AS_GIVEN)
    assert sum(len(table) for table in tables) == len(KNOWN)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("linear", "float16"),
        ("scaled_dot_product_attention", "float16"),
        ("softmax", "float32"),
        ("cross_entropy", "float32"),
        ("layer_norm", "float32"),
        ("sum", "float32"),
        ("add", "promote"),
        ("cat", "promote"),
        ("relu", None),
    ],
)
def test_the_default_classes_are_those_of_mixed_precision(op, expected):
    assert OpClasses.default().class_of_each().get(op) == expected


def test_changes_move_ops_and_leave_the_others():
    before = OpClasses.default()
    after = before.with_changes(float16=["softmax"], float32=["gelu", "add"], promote=["matmul"])
    moved = {"softmax": "float16", "gelu": "float32", "add": "float32", "matmul": "promote"}
    assert after.class_of_each() == {**before.class_of_each(), **moved}
    assert before == OpClasses.default()


def test_no_op_is_in_two_classes_after_changes():
    after = OpClasses.default().with_changes(promote=FLOAT16)
    assert after.float16 == ()
    assert sum(len(getattr(after, name)) for name in CLASSES) == len(FLOAT16 + FLOAT32 + PROMOTE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"float32": ["sofmax"]}, "unknown op 'sofmax' in float32: did you mean 'softmax'?"),
        ({"promote": ["quux_42"]}, "unknown op 'quux_42' in promote: docs/mixed-precision.md lists"),
        ({"float16": ["gelu"], "float32": ["gelu"]}, "'gelu' is in float16 and in float32"),
        ({"float16": "gelu"}, "expected a list of ops, ['gelu']"),
        ({"float32": [["gelu"]]}, "unknown op ['gelu'] in float32"),
        ({"float32": [{}]}, "unknown op {} in float32"),
        ({"float32": None}, "float32 = None: expected a list of ops"),
        ({"promote": 3}, "promote = 3: expected a list of ops"),
        ({"promote": {"gelu": True}}, "promote = {'gelu': True}: expected a list of ops"),
    ],
)
def test_unknown_or_contradictory_changes_are_rejected_in_one_line(changes, message):
    for use in (lambda: OpClasses(**changes), lambda: OpClasses().with_changes(**changes)):
        with pytest.raises(UserError) as caught:
            use()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_argument_may_be_op_classes_or_changes_or_none():
    quiet = OpClasses()
    assert OpClasses.given(quiet) is quiet
    assert OpClasses.given(None) == OpClasses.given({}) == OpClasses.default()
    assert OpClasses.given({"float32": ["gelu"]}) == OpClasses.default().with_changes(float32=["gelu"])


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["gelu"], "classes = ['gelu'] of operations is not valid: pass an OpClasses"),
        ("gelu", "classes = 'gelu'"),
        ({"fp32": ["gelu"]}, "unknown class of operations 'fp32'"),
        ({1: ["gelu"]}, "unknown class of operations 1"),
        ({"float32": "gelu"}, "expected a list of ops"),
    ],
)
def test_any_other_argument_is_rejected_in_one_line(classes, message):
    with pytest.raises(UserError) as caught:
        OpClasses.given(classes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_changes_of_one_op_are_refused():
    with pytest.raises(UserError, match="'exp' is in float16 and in promote"):
        OpClasses.default().with_changes(float16=["exp"], promote=["exp"])


def test_the_guide_lists_every_op_under_its_class():
    text = (Path(__file__).parents[3] / "docs" / "mixed-precision.md").read_text(encoding="utf-8")
    for base in ("conv", "conv_transpose"):
        text = text.replace(f"{base}1d–3d", f"{base}1d, {base}2d, {base}3d")
    text = text.replace(
        "binary_cross_entropy(_with_logits)", "binary_cross_entropy, binary_cross_entropy_with_logits"
    )
    listed, current = {}, ""
    for line in text[text.index("| class |") :].split("\n\n")[0].splitlines()[2:]:
        _, name, ops, _, _ = (cell.strip() for cell in line.split("|"))
        current = name.strip("`") or current
        listed.setdefault(current, []).extend(ops.split(", "))
    expected = {"float16": FLOAT16, "float32": FLOAT32, "promote": PROMOTE, "none": AS_GIVEN}
    assert {name: sorted(ops) for name, ops in listed.items()} == {
        name: sorted(ops) for name, ops in expected.items()
    }


def test_classes_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        OpClasses.default().float16 = ()


def test_the_table_loads_without_torch():
    code = "import sys, megalowbit.optim.precision.op_classes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
