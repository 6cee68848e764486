"""Gradients that users clear, set or read: two ranks, every ZeRO stage, one meaning.

`ranks_user_gradients.py` runs all cases in one process group.
"""

import pytest
from quick_cases import slow_except

pytestmark = [pytest.mark.slow, pytest.mark.quick_part]

NO_BACKWARD = "engine.step() before any backward: call engine.backward(loss) first"
HALVES = [f"{stage}, {precision}" for stage in "0123" for precision in ("fp16", "bf16")]
CELLS = [
    *HALVES,
    *(f"{stage}, fp32" for stage in "0123"),
    "2 offload, fp16",
    "2 offload, fp32",
    "3 offload, bf16",
]


QUICK = {"0, fp32", "0, fp16", "1, bf16", "2 offload, fp16", "3, fp32"}


@pytest.fixture
def seen(launch_once, part):
    return launch_once("ranks_user_gradients.py", part)


@pytest.mark.parametrize("cell", slow_except(QUICK, CELLS))
def test_cleared_gradients_have_no_effect(seen, cell):
    for rank in seen:
        for dirty, clean in (*rank[cell]["cleared"], rank[cell]["cleared_inside"]):
            assert dirty == clean
        assert rank[cell]["cleared"] == seen[0][cell]["cleared"]  # no rank has kept anything of its own


@pytest.mark.parametrize("cell", slow_except(QUICK, CELLS))
def test_gradients_set_by_hand_are_applied_as_at_stage_0(seen, cell):
    norm, masters, moments = seen[0]["0, fp32"]["set_by_hand"]
    scale = 64.0 if "fp16" in cell else 1.0
    for rank in seen:
        found = rank[cell]["set_by_hand"]
        assert found[0] == pytest.approx(norm / scale, rel=1e-2)
        for one, two in zip(found[1], masters, strict=True):
            assert one == pytest.approx(two, rel=1e-3, abs=1e-3)
        for one, two in zip(found[2], moments, strict=True):
            assert one == pytest.approx(two, rel=1e-2, abs=1e-5)


@pytest.mark.parametrize("cell", slow_except(QUICK, CELLS))
def test_full_gradients_are_the_scaled_average(seen, cell):
    tolerance = 1e-5 if "fp32" in cell else 5e-2
    for rank in seen:
        found, expected = rank[cell]["whole_gradients"]
        largest = max(abs(value) for each in expected for value in each)
        for one, two in zip(found, expected, strict=True):
            assert one == pytest.approx(two, rel=tolerance, abs=tolerance * largest)


@pytest.mark.parametrize("cell", slow_except(QUICK, CELLS))
def test_a_step_without_gradients_is_refused_on_all_ranks(seen, cell):
    for rank in seen:
        outcomes, masters = rank[cell]["refused"]
        assert outcomes == [NO_BACKWARD, "applied", NO_BACKWARD, NO_BACKWARD, "applied"]
        assert masters == seen[0][cell]["refused"][1]


def test_a_plain_loop_clears_gradients_before_and_after_they_are_averaged(seen):
    for rank in seen:
        dirty, clean = rank["local_ddp"]
        assert dirty == clean == seen[0]["local_ddp"][0]
