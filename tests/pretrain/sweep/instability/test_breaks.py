"""Breaks planted into losses at known steps, and a brute-force search for them in random ones."""

import math
import random

import numpy as np
import pytest

from megalowbit.pretrain.sweep.instability.breaks import judge, window_means
from megalowbit.pretrain.sweep.instability.settings import InstabilitySettings

SETTINGS = InstabilitySettings(window=4, rise=0.5, gap=0.25)
FALLING = [5.0 - 0.02 * step for step in range(1, 101)]


def judged(losses, baseline=None, *, steps=100):
    return judge(losses, baseline, steps=steps, settings=SETTINGS)


def changed(start, end, by):
    return [loss + by * (start <= step <= end) for step, loss in enumerate(FALLING, start=1)]


def test_a_calm_run_has_not_broken():
    found = judged(FALLING, FALLING)
    assert found.breaks == ()
    assert not found.is_broken_at_end
    assert found.end == pytest.approx(sum(FALLING[-4:]) / 4)
    assert found.gap == 0


def test_a_loss_that_is_not_finite_breaks_at_its_step_even_before_a_window_is_full():
    losses = [*FALLING[:2], None, *FALLING[3:]]
    found = judged(losses, FALLING)
    assert [(each.kind, each.step, each.distance) for each in found.breaks] == [("not finite", 3, None)]
    assert not found.is_broken_at_end  # it came back


def test_a_rise_is_found_when_the_mean_has_risen_and_not_with_a_single_loss():
    assert judged(changed(50, 50, 1.9)).breaks == ()  # a quarter of it in the mean: .475 - .02
    # 2 from step 50 on: the mean of 47 to 50 is .5 - .02 above the best, that of 48 to 51 is 1 - .04
    (found,) = judged(changed(50, 100, 2.0)).breaks
    assert (found.kind, found.step) == ("rise", 51)
    assert found.distance == pytest.approx(0.96)


def test_a_rise_that_ends_has_recovered():
    # after step 80 the loss is 1 lower than at 30: the mean is below its former best
    assert not judged(changed(31, 40, 2.0)).is_broken_at_end
    assert judged(changed(31, 100, 2.0)).is_broken_at_end


def test_a_gap_is_that_of_means_of_equal_steps():
    baseline = [loss - 0.01 * max(0, step - 40) for step, loss in enumerate(FALLING, start=1)]
    found = judged(FALLING, baseline)
    # .01 × (step - 41.5) is above .25 from step 67 on; the windows that end at 67 and 71 have no common step
    assert [(each.kind, each.step) for each in found.breaks] == [("gap", 71)]
    assert found.is_broken_at_end
    assert found.gap == pytest.approx(0.01 * (100 - 41.5))


def test_a_spike_is_no_gap():
    assert judged(changed(50, 50, 1.9), FALLING).breaks == ()  # .475 in four means
    (found,) = judged(changed(50, 51, 1.05), FALLING).breaks  # .2625 in two more
    assert (found.kind, found.step) == ("gap", 54)


def test_a_run_that_closed_its_gap_is_not_broken_at_its_end_by_a_last_spike():
    losses = changed(50, 51, 1.05)
    losses[-1] += 1.9
    found = judged(losses, FALLING)
    assert [(each.kind, each.step) for each in found.breaks] == [("gap", 54)]
    assert found.gap == pytest.approx(1.9 / 4)
    assert not found.is_broken_at_end
    losses[-5:] = [loss + 0.4 for loss in FALLING[-5:]]  # three means are apart, and five must be
    assert not judged(losses, FALLING).is_broken_at_end
    losses[-8:] = [loss + 0.4 for loss in FALLING[-8:]]
    assert judged(losses, FALLING).is_broken_at_end


def test_a_baseline_that_has_broken_itself_is_not_compared_with_from_then_on():
    down_then_nan = [*(loss - 0.3 * (step > 60) for step, loss in enumerate(FALLING[:62], start=1)), None]
    # it ends before enough of its means are .25 lower
    found = judged(FALLING, down_then_nan)
    assert found.breaks == ()
    assert math.isnan(found.gap)


def test_a_run_that_was_stopped_is_broken_at_its_end():
    found = judged([*FALLING[:30], *[None] * 10])
    assert found.breaks[0].step == 31
    assert found.is_broken_at_end
    assert math.isnan(found.end)


def test_the_first_break_of_each_kind_is_kept_in_order_of_steps():
    losses = [*changed(50, 100, 2.0)[:70], *[None] * 5]
    found = judged(losses, FALLING)
    assert [(each.kind, each.step) for each in found.breaks] == [
        ("rise", 51),
        ("gap", 54),
        ("not finite", 71),
    ]


def test_random_losses_break_where_a_search_over_all_pairs_of_windows_finds_it():
    draw = random.Random(1)
    kinds = set()
    for _ in range(200):
        walk = np.cumsum([draw.gauss(0, 0.12) for _ in range(60)]) + 4
        own = walk + np.array([draw.gauss(0, 0.3) for _ in range(60)])
        means = np.array([np.nan] * 3 + [own[end - 4 : end].mean() for end in range(4, 61)])
        peers = np.array([np.nan] * 3 + [walk[end - 4 : end].mean() for end in range(4, 61)])
        rises = [b for b in range(60) for a in range(b) if means[b] - means[a] > SETTINGS.rise]
        peer_breaks = [b for b in range(60) for a in range(b) if peers[b] - peers[a] > SETTINGS.rise]
        until = min(peer_breaks, default=60)
        above = means - peers > SETTINGS.gap
        gaps = [step for step in range(4, until) if above[step - 4 : step + 1].all()]
        expected = {"rise": min(rises, default=None), "gap": min(gaps, default=None)}
        found = {each.kind: each.step - 1 for each in judged(own.tolist(), walk.tolist(), steps=60).breaks}
        assert found == {kind: step for kind, step in expected.items() if step is not None}
        kinds |= set(found)
    assert kinds == {"rise", "gap"}


def test_means_of_windows_that_are_not_full_or_not_finite_are_unknown():
    means = window_means([1.0, 2.0, 3.0, None, 5.0, 6.0], 2)
    assert [None if math.isnan(mean) else mean for mean in means] == [None, 1.5, 2.5, None, None, 5.5]
