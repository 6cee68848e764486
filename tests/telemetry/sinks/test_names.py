"""Names in TensorBoard and trackers; docs/runs.md shows the whole translation."""

import re
from pathlib import Path

import pytest

from megalowbit.telemetry.sinks.names import SINK_NAMES, named, sink_name

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## TensorBoard, W&B and trackio") :].split("\n## ")[0]
FIGURES = PAGE[PAGE.index("## The figures") :].split("\n## ")[0]
GROUPED = ("gradient_overflow/", "quantization/", "speculation/", "oscillation/")


def documented():
    """Names in the files and in the sinks; those with a placeholder end in a slash."""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", SECTION, re.M)
    return {re.sub(r"<\w+>$", "", name): re.sub(r"<\w+>$", "", there) for name, there in rows}


def test_the_page_has_the_whole_table():
    assert documented() == dict(SINK_NAMES)


def test_every_field_of_the_page_has_a_group_in_the_sinks():
    console, others = (part[0] for part in (FIGURES.partition("| field |"), FIGURES.split("| field |")[1:]))
    fields = {*re.findall(r"^\| `[^`]+` \| `([^`]+)` \|", console, re.M)}
    for cell in re.findall(r"^\| ([^|]+) \|", others, re.M):
        fields |= set(re.findall(r"`([^`]+)`", cell))
    assert len(fields) > 45
    for field in fields - {"step"}:
        assert "/" in sink_name(field), field
        assert sink_name(field) != field or field.startswith(GROUPED), field


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "train/loss"),
        ("loss/web", "train/loss/web"),
        ("loss_scale", "train/loss_scale"),
        ("validation/bits_per_byte", "val/bits_per_byte"),
        ("milliseconds/copy/out", "perf/milliseconds/copy/out"),
        ("gradient_overflow/underflow_rate", "gradient_overflow/underflow_rate"),
        ("validation", "validation"),
    ],
)
def test_a_name_is_translated_by_itself_or_by_its_section(name, expected):
    assert sink_name(name) == expected


def test_no_two_names_become_one():
    assert len(set(SINK_NAMES.values())) == len(SINK_NAMES)
    assert not set(SINK_NAMES.values()) & set(SINK_NAMES), "a former name would hide another curve"


def test_former_names_are_added_on_request():
    facts = {"loss": 2.0, "mfu": None, "gradient_overflow/underflow_rate": 0.1}
    new = {"train/loss": 2.0, "perf/mfu": None, "gradient_overflow/underflow_rate": 0.1}
    assert named(facts) == new
    assert named(facts, with_former=True) == {**facts, **new}
