import json
import os
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.json_text import NotJsonError, is_finite_number, parse_json, read_json_object, short_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES, st.booleans())
def test_json_of_the_standard_library_is_read_back(value, is_strict):
    assert parse_json(json.dumps(value), "x", is_strict=is_strict) == value


def test_a_byte_order_mark_is_skipped(tmp_path):
    assert parse_json("\ufeff[1]", "x") == [1]
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json_object(tmp_path / "x.json") == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "x is nested too deeply"),
        ("[" * 101 + "]" * 101, "x is nested too deeply"),
        ('{"a": ' * 100_000, "x is nested too deeply"),
        ("9" * 5000, "x holds an integer of thousands of digits"),
        ("{'a': 1}", "x is not JSON: line 1, column 2"),
        ('{"a": 1,\n "b" 2}', "x is not JSON: line 2, column 6"),
        ("", "x is not JSON: line 1, column 1"),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_every_parser_error_is_a_one_line_error(text, message, is_strict):
    with pytest.raises(UserError, match=message) as caught:
        parse_json(text, "x", is_strict=is_strict)
    assert len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, NotJsonError) == ("is not JSON" in message)


@pytest.mark.parametrize(
    ("text", "value", "message"),
    [
        ('{"a": {"b": 1, "b": 2}}', {"a": {"b": 2}}, "x: key 'b' occurs twice"),
        ('{"a": Infinity}', {"a": float("inf")}, "x: Infinity is not a JSON number"),
    ],
)
def test_only_the_strict_reader_rejects_non_standard_json(text, value, message):
    assert parse_json(text, "x") == value
    with pytest.raises(UserError, match=message):
        parse_json(text, "x", is_strict=True)


def test_a_text_from_the_middle_of_a_file_is_named_by_its_line_there():
    with pytest.raises(UserError, match="x is not JSON: line 7, column 2"):
        parse_json("{1}", "x", first_line=7)
    with pytest.raises(UserError, match="x, line 7 is nested too deeply"):
        parse_json("[" * 100_000, "x", first_line=7)


def test_a_file_without_an_object_is_named(tmp_path):
    path = tmp_path / "x.json"
    for content, message in ((b"[1]", "holds a list, not an object"), (b"\xff", "is not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"x\.json {message}"):
            read_json_object(path)
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        read_json_object(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "is_number"),
    [
        ("0", True),
        ("-2.5", True),
        ("1e308", True),
        ("true", False),
        ('"1"', False),
        ("null", False),
        ("NaN", False),
        ("-Infinity", False),
        ("1e400", False),
        ("1" + 400 * "0", False),
    ],
)
def test_numbers_that_no_float_can_hold_are_recognised(text, is_number):
    value = parse_json(text, "x")
    assert is_finite_number(value) is is_number


def test_a_hundred_levels_are_accepted_and_wide_values_are_not_deep():
    assert parse_json("[" * 100 + "]" * 100, "x")
    assert parse_json("[" + "[]," * 1000 + "{}]", "x")


@pytest.mark.parametrize("kind", ["FIFO", "device", "socket", "directory", "nothing", "huge"])
def test_only_regular_files_of_a_plausible_size_are_read(tmp_path, kind):
    path = tmp_path / "x.json"
    messages = {
        "FIFO": "is a FIFO: name a regular file",
        "device": "is a device: name a regular file",
        "socket": "is a socket: name a regular file",
        "directory": r"cannot read .* Is a directory; give an existing JSON file",
        "nothing": r"cannot read .* No such file",
        "huge": "has more than 67,108,864 bytes",
    }
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            server.bind(str(path))
        elif kind == "directory":
            path.mkdir()
        elif kind == "huge":
            with path.open("wb") as file:
                file.truncate(64 * 2**20 + 1)
        with pytest.raises(UserError, match=messages[kind]):
            read_json_object(path)


@given(st.integers() | st.floats() | st.integers(min_value=10**308, max_value=10**310))
def test_a_number_is_finite_if_it_converts_to_a_finite_float(value):
    try:
        expected = abs(float(value)) < float("inf")
    except OverflowError:
        expected = False
    assert is_finite_number(value) is expected


@given(VALUES, st.integers(1, 60))
def test_printed_json_is_the_value_and_breaks_only_what_does_not_fit(value, width):
    text = short_json(value, width=width)
    assert json.loads(text) == value
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line[-1] in "[{":
            columns = len(line) - len(line.lstrip())
            last = next(i for i, each in enumerate(lines) if i > number and each[columns] in "]}")
            joined = line + " ".join(each.strip() for each in lines[number + 1 : last]) + lines[last].strip()
            assert len(joined.rstrip(",")) >= width  # with a comma it is longer than a line
        elif re.fullmatch(r'\s*("(\\.|[^"\\])*": )?(\[.+\]|\{.+\}),?', line):
            assert len(line) <= width


def test_objects_that_fit_are_on_one_line():
    value = {"optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "name": "é", "empty": {}, "steps": 700}
    assert short_json(value) == (
        '{"optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "name": "\\u00e9", "empty": {}, "steps": 700}'
    )
    assert (
        short_json(value, width=51)
        == """{
  "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]},
  "name": "\\u00e9",
  "empty": {},
  "steps": 700
}"""
    )
    assert short_json(value, width=50).splitlines()[1:5] == [
        '  "optimizer": {',
        '    "lr": 0.001,',
        '    "betas": [0.9, 0.95]',
        "  },",
    ]
