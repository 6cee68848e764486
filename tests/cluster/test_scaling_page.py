"""What docs/scaling.md computes follows from the formulas that it gives."""

import math
import re
from pathlib import Path

import pytest

from megalowbit.pretrain.job import Job
from megalowbit.supervision.settings import WatchdogSettings

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
RANKS = (8, 512, 16384)


def all_reduce(ranks):
    return 6.8 + 2 * (7 * 0.6 + 5.0 * math.log2(ranks / 8))


def all_gather(ranks):
    nodes = ranks // 8
    return 6.6 + 7 * 0.6 if nodes == 1 else 6.6 + 2.7 * (nodes - 1) + 1.0 * (ranks - nodes)


@pytest.mark.parametrize(("name", "formula"), [("all-reduce", all_reduce), ("all-gather", all_gather)])
def test_times_of_small_messages_are_those_of_the_formulas(name, formula):
    row = re.search(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)[1]
    stated = [float(cell.replace(",", "")) for cell in row.split(" | ")]
    assert stated == [pytest.approx(formula(ranks), abs=0.5) for ranks in RANKS]


def test_each_row_over_all_ranks_has_these_times():
    rows = re.findall(r"^\| .*\| all[ ;(|].*$", PAGE, re.MULTILINE)
    for row in (row for row in rows if "| all-reduce," in row or "2 all-reduces" in row):
        calls = 2 if "2 all-reduces" in row else 1
        stated = [int(cell) for cell in re.findall(r"(\d+) µs", row)]
        assert stated == [pytest.approx(calls * all_reduce(ranks), abs=calls) for ranks in RANKS], row
    assert len(rows) >= 5


def test_maxima_of_tensor_parallelism_add_up():
    messages = 32 * 12
    assert f"{messages} messages a micro-batch, {messages * all_reduce(8) / 1000:.1f} ms" in PAGE


def test_the_watchdog_uses_the_heartbeat_interval_of_its_settings():
    ranks, default = RANKS[-1], WatchdogSettings().interval
    of_timeout = {
        seconds: WatchdogSettings(timeout=seconds, silence=None).interval for seconds in (5, 6, 24, 600)
    }
    of_silence = {seconds: WatchdogSettings(silence=seconds).interval for seconds in (3, 12, 600)}
    shortest, longest = of_timeout[5], of_timeout[600]
    assert of_timeout == {5: shortest, 6: shortest, 24: 24 / 12, 600: longest}
    assert of_silence == {3: shortest, 12: 12 / 6, 600: longest}
    words = " ".join(PAGE.split())
    assert "a twelfth of `watchdog.timeout` or a sixth of `watchdog.silence`, whichever is shorter" in words
    assert f"but at least {shortest} s and at most {longest:.0f} s; by default it is {default} s" in words
    assert f"{round(ranks / default, -2):,.0f} such pairs a second" in words
    assert f"{round(ranks / shortest, -3):,.0f} at a timeout of 6 s" in words
    assert "two descriptors: `ulimit -n` of 40,000" in PAGE
    assert 2 * ranks < 40_000


def test_the_scaling_page_names_existing_code():
    section = PAGE.split("## What stops scaling first")[1]
    assert "Job._weight_splits" in section
    assert hasattr(Job, "_weight_splits")


def test_the_page_says_where_each_kind_of_figure_comes_from_and_stays_short():
    assert all(f"**{mark}**" in PAGE for mark in "mca")
    assert len(PAGE.splitlines()) <= 180
