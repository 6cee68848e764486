import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.telemetry import columns

FACTS = {
    "loss": 5.48213,
    "lr": 6e-4,
    "grad_norm": 1.2345,
    "loss_scale": 65536.0,
    "skipped_steps": 2,
    columns.SATURATION_RATE: 0.03512,
    "tokens_per_second": 12345.6,
}
anything = st.one_of(st.none(), st.floats(), st.integers(-(10**30), 10**30))


def test_a_line_stands_below_its_heading():
    heading = columns.heading(500)
    line = columns.line(120, 500, FACTS, eta=133, is_skipped=False)
    assert heading.split() == [
        "step",
        "loss",
        "lr",
        "grad_norm",
        "scale",
        "skips",
        "saturated",
        "tok/s",
        "ETA",
    ]
    assert line.split() == [
        "120/500",
        "5.4821",
        "6.00e-04",
        "1.234",
        "2^16",
        "2",
        "3.51%",
        "12.3k",
        "0:02:13",
    ]
    assert len(line) == len(heading)
    ends = [index for index in range(len(line)) if line[index] != " " and (line + " ")[index + 1] == " "]
    assert ends == [
        index for index in range(len(line)) if heading[index] != " " and (heading + " ")[index + 1] == " "
    ]


@pytest.mark.parametrize("total", [1, 500, 99_999, 1_000_000])
def test_lines_fit_eighty_characters_with_the_skip_mark_up_to_99999_steps(total):
    line = columns.line(total, total, FACTS, eta=86399, is_skipped=True)
    assert line.endswith(" SKIP")
    assert len(line) <= (88 if total > 99_999 else 86)
    assert len(columns.heading(total)) <= 83


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FACTS, anything)), st.one_of(st.none(), st.floats()))
def test_any_facts_make_nine_separate_ascii_figures(facts, eta):
    line = columns.line(3, 500, facts, eta=eta, is_skipped=False)
    assert len(line.split()) == 9
    assert line.isascii()
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (columns.loss_text, math.nan, "nan"),
        (columns.loss_text, 123456.0, "1.23e+05"),
        (columns.loss_text, None, "-"),
        (columns.norm_text, math.inf, "inf"),
        (columns.norm_text, 4321.0, "4.32e+03"),
        (columns.scale_text, 2.0**32, "2^32"),
        (columns.scale_text, 1.0, "1"),
        (columns.scale_text, 100.0, "100"),
        (columns.scale_text, math.inf, "inf"),
        (columns.percent_text, 0.0, "0.00%"),
        (columns.percent_text, 1e-9, "<0.01%"),
        (columns.percent_text, 1.0, "100.00%"),
        (columns.amount_text, 0, "0"),
        (columns.amount_text, 999.4, "999"),
        (columns.amount_text, 999.6, "1.00k"),
        (columns.amount_text, 45_600_000, "45.6M"),
        (columns.amount_text, 3.2e15, "3200T"),
        (columns.clock_text, 59.6, "0:01:00"),
        (columns.clock_text, 86399.0, "23:59:59"),
        (columns.clock_text, 273900.0, "3d04:05"),
        (columns.clock_text, math.inf, "-"),
        (columns.count_text, None, "-"),
    ],
)
def test_figures_are_short_and_correctly_rounded(text, value, expected):
    assert text(value) == expected


def test_runs_with_a_known_peak_have_a_column_for_mfu():
    facts = {**FACTS, "mfu": 0.41678}
    heading = columns.heading(500, facts)
    line = columns.line(120, 500, facts, eta=133, is_skipped=False)
    assert heading.split()[-3:] == ["tok/s", "MFU", "ETA"]
    assert line.split()[-3:] == ["12.3k", "41.68%", "0:02:13"]
    assert len(line) == len(heading) == len(columns.heading(500)) + 7
