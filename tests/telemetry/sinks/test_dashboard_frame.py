"""What the dashboard shows, without a terminal."""

import math

import pytest

from megalowbit.telemetry.sinks.dashboard_frame import (
    ASCII_BARS,
    BARS,
    MOST_BUCKETS,
    Curve,
    RunState,
    frame,
)

FACTS = {
    "loss": 2.5,
    "lr": 6e-4,
    "grad_norm": 1.25,
    "loss_scale": 2.0**16,
    "skipped_steps": 0,
    "tokens_per_second": 4321.0,
    "step_ms": 1750.0,
    "mfu": 0.412,
    "speculation/share_int8": 0.25,
    "speculation/share_fp8": 0.75,
    "speculation/share_8bit_or_less": 1.0,
}


def shown(state, width=80, rows=20, **options):
    return [line.plain for line in frame(state, width, rows, **options)]


def state_of(*steps, total=100):
    state = RunState(title="tiny", total_steps=total)
    for step, facts in steps:
        state.add(step, facts, None)
    return state


def test_figures_of_a_step_in_words():
    lines = shown(state_of((50, FACTS)))
    assert lines[1].endswith(" 50%  ETA -")
    assert lines[2] == "loss 2.5000  ▁"
    assert lines[3] == "lr 6.00e-04  grad norm 1.250  scale 2^16  skips 0  tok/s 4.32k  step 1.75 s"
    assert lines[4] == "MFU 41.20%"
    assert lines[5] == "precision  fp8 75%  int8 25%"
    assert len(lines) == 6


def test_figures_that_a_step_lacks_keep_their_last_value_but_the_norm():
    state = state_of((1, FACTS), (2, {"loss": 2.0, "grad_norm": None, "mfu": None}))
    lines = shown(state)
    assert "grad norm -" in lines[3]
    assert "scale 2^16" in lines[3]
    assert lines[4] == "MFU 41.20%"
    state.add(3, {"speculation/share_bf16": 1.0}, None)
    assert shown(state)[-1] == "precision  bf16 100%"


def test_skips_and_rollbacks_are_the_newest_warnings():
    state = state_of((4, {"skipped/tensor": "wte.weight", "skipped/rank": 3}))
    assert shown(state)[-1] == "! step 4 skipped: overflow in wte.weight on rank 3"
    state.add(5, {"rollbacks": 1}, None)
    state.add(6, {"rollbacks": 1}, None)
    state.warnings.append("a\x1b[2Jb\nc")
    assert shown(state)[-2:] == ["! rolled back to step 4, rollback 1 of the run", "! a?[2Jb c"]


@pytest.mark.parametrize("width", [1, 2, 7, 20, 40, 79, 200])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 30])
def test_lines_fit_any_terminal(width, rows):
    state = state_of((99, {**FACTS, "loss": math.nan, "validation/loss": 1e30}), total=10**9)
    state.warnings.append("x" * 300)
    for is_ascii in (False, True):
        lines = frame(state, width, rows, is_ascii=is_ascii)
        assert len(lines) <= rows
        assert all(line.cell_len <= width for line in lines)
        assert not is_ascii or all(line.plain.isascii() for line in lines)
    if rows and width >= 20:
        assert any(line.plain.startswith("99/1,000,000,000") for line in lines)


def test_a_run_without_a_step_or_beyond_its_last_one_can_be_drawn():
    assert shown(RunState(title="", total_steps=0))[1].startswith("0/0 ─")
    beyond = shown(state_of((12, {"loss": math.inf}), total=10))
    assert "100%" in beyond[1]
    assert beyond[2] == "loss inf"


def test_a_curve_has_the_means_of_equal_parts():
    curve = Curve()
    for value in range(8):
        curve.add(float(value))
    assert curve.drawn(8, BARS) == BARS
    assert curve.drawn(4, BARS) == "▁▃▆█"
    assert curve.drawn(100, ASCII_BARS) == ASCII_BARS
    curve.add(math.nan)
    curve.add(None)
    assert curve.drawn(8, BARS) == BARS


def test_a_long_curve_keeps_its_shape_in_little_memory():
    curve = Curve()
    for step in range(100_000):
        curve.add(float(step < 50_000))
    drawn = curve.drawn(10, BARS)
    assert drawn == "█████▁▁▁▁▁"
    assert len(curve._means) < MOST_BUCKETS


def test_a_constant_curve_is_flat():
    curve = Curve()
    assert curve.drawn(5, BARS) == ""
    curve.add(3.0)
    curve.add(3.0)
    assert curve.drawn(5, BARS) == "▁▁"
    assert curve.drawn(0, BARS) == ""
