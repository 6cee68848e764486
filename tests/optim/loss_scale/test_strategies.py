import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler, is_losing

OVERFLOW = 65520.0  # the smallest number that rounds to infinity in fp16
AMAX_STRATEGIES = [MaxValueGradScaler, MaxNormGradScaler, ControllerGradScaler]
STRATEGIES = [*AMAX_STRATEGIES, NormRatioGradScaler]
steady = settings(deadline=None, derandomize=True)


def statistics(scaler, amax=None, ratio=None, flushed=None):
    return GradientStatistics(loss_scale=scaler.scale, amax=amax, norm_ratio=ratio, flushed_fraction=flushed)


def simulate(scaler, amaxes, lossless_from=None):
    """Run steps whose largest unscaled gradients are `amaxes`.

    With `lossless_from`, probed steps lose gradients while amax · S is below it.

    Returns:
        Numbers of the steps that overflowed, and amax · S of each step.
    """
    overflows, scaled = [], []
    for index, amax in enumerate(amaxes):
        product = amax * scaler.scale
        scaled.append(product)
        found_inf = product >= OVERFLOW
        overflows += [index] * found_inf
        flushed = None
        if scaler.wants_probe and lossless_from is not None:
            flushed = 0.5 if product < lossless_from else 0.0
        scaler.update(found_inf, None if found_inf else statistics(scaler, amax, flushed=flushed))
    return overflows, scaled


def test_max_value_takes_the_mean_of_logarithms_or_the_last_value_if_that_is_lower():
    decay, target = 0.75, 2.0**15
    scaler = MaxValueGradScaler(2.0**40, max_scale=2.0**60, target=target, ema_decay=decay)
    generator, octaves = random.Random(0), []
    for _ in range(50):
        amax = 2.0 ** generator.uniform(-12, -8)
        octaves.append(math.log2(target / amax))
        before = scaler.scale
        after = scaler.update(False, statistics(scaler, amax))
        weights = [decay**age for age in range(len(octaves))][::-1]
        mean = sum(w * x for w, x in zip(weights, octaves, strict=True)) / sum(weights)
        wanted = math.floor(min(mean, octaves[-1]))
        assert after == min(2.0**wanted, 2 * before)


def test_max_value_settles_exactly_where_the_target_is_reached():
    scaler = MaxValueGradScaler()
    simulate(scaler, [2.0**-7] * 100)
    assert scaler.scale * 2.0**-7 == 2.0**15


def test_max_value_between_two_moves_remembers_the_largest_gradient():
    scaler = MaxValueGradScaler(2.0**20, update_every=4, ema_decay=0.99)
    for amax in (2.0**-5, 2.0**-2, 2.0**-5, 2.0**-5):
        scaler.update(False, statistics(scaler, amax))
    assert scaler.scale == 2.0**17


def test_an_overflow_does_not_change_the_statistics_of_max_value():
    scaler = MaxValueGradScaler()
    simulate(scaler, [2.0**-6] * 20)
    before = scaler.state_dict()
    scaler.update(True, statistics(scaler, math.inf))
    after = scaler.state_dict()
    assert (after["mean"], after["weight"]) == (before["mean"], before["weight"])
    assert after["scale"] == before["scale"] / 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("amax", [None, 0.0, math.inf, math.nan])
def test_statistics_without_information_keep_the_scale(strategy, amax):
    scaler = strategy(2.0**12)
    simulate(scaler, [2.0**3] * 10)
    before = scaler.scale
    assert [scaler.update(False, statistics(scaler, amax)) for _ in range(20)] == [before] * 20
    assert [scaler.update(False) for _ in range(20)] == [before] * 20


@pytest.mark.parametrize("strategy", AMAX_STRATEGIES)
def test_a_jump_of_the_gradients_by_4_costs_two_overflows_at_most(strategy):
    overflows, scaled = simulate(strategy(), [1e-3] * 300 + [4e-3] * 700)
    assert len(overflows) <= 2
    assert overflows == [300 + i for i in range(len(overflows))]
    assert 2.0**13.9 <= scaled[-1] < OVERFLOW


@pytest.mark.parametrize("strategy", AMAX_STRATEGIES)
def test_gradients_that_shrink_over_6_decades_are_followed_without_overflow(strategy):
    steps = 3000
    scaler = strategy(max_scale=2.0**60)
    overflows, scaled = simulate(scaler, [10.0 ** (-6 * i / steps) for i in range(steps)])
    assert not overflows
    assert min(scaled[5:]) >= 2.0**13.5


@pytest.mark.parametrize("strategy", AMAX_STRATEGIES)
def test_a_scale_far_too_high_comes_down_by_an_octave_a_step_and_follows_from_there(strategy):
    steps = 1000  # faster than patience alone would allow
    amaxes = [1e3 * 10.0 ** (-6 * i / steps) for i in range(steps)]
    overflows, scaled = simulate(strategy(2.0**15, 2.0**-10, max_scale=2.0**60), amaxes)
    assert overflows == list(range(len(overflows)))
    assert len(overflows) <= 10
    assert scaled[-1] >= 2.0**12


@pytest.mark.parametrize("strategy", AMAX_STRATEGIES)
@pytest.mark.parametrize("swing", [4, 64, 1000])
def test_gradients_that_alternate_overflow_in_one_step_of_a_hundred_at_most(strategy, swing):
    steps = 4000
    overflows, _ = simulate(strategy(), [1e-3 * (swing if i % 2 else 1) for i in range(steps)])
    settled = [i for i in overflows if i >= 200]
    assert len(settled) <= (steps - 200) / 100 + 1


@pytest.mark.parametrize("strategy", AMAX_STRATEGIES)
@pytest.mark.parametrize("octaves", [0.5, 1.5])
def test_noisy_gradients_overflow_in_one_step_of_a_hundred_at_most(strategy, octaves):
    generator, steps = random.Random(1), 4000
    overflows, scaled = simulate(strategy(), [1e-3 * 2 ** generator.gauss(0, octaves) for _ in range(steps)])
    assert len(overflows) <= steps / 100
    assert sorted(scaled)[steps // 2] >= 2.0**10  # the price of safety is not a useless scale


def test_norm_ratio_probes_the_first_step_and_then_every_n_clean_steps():
    scaler = NormRatioGradScaler(probe_every=3)
    wants = []
    for found_inf in [False, False, False, True, True, False, False]:
        wants.append(scaler.wants_probe)
        scaler.update(found_inf, statistics(scaler))
    assert wants == [True, False, False, True, True, True, False]
    assert not scaler.needs_amax


@pytest.mark.parametrize(
    ("ratio", "flushed", "expected"),
    [
        (None, None, None),
        (1.0, 0.0, False),
        (1.05, 0.05, False),
        (1.06, 0.0, True),
        (math.inf, None, True),  # everything was flushed
        (None, 0.06, True),
        (0.1, 0.0, False),  # overflow is found_inf's job
        (math.nan, math.nan, False),
        (math.nan, 0.06, True),
    ],
)
def test_gradients_are_lost_above_a_share_of_the_norm_or_of_the_elements(ratio, flushed, expected):
    seen = GradientStatistics(loss_scale=1.0, norm_ratio=ratio, flushed_fraction=flushed)
    assert is_losing(seen, 0.05) is expected


def test_norm_ratio_grows_by_one_octave_for_each_probe_that_lost_gradients():
    scaler = NormRatioGradScaler(4.0)
    found = [scaler.update(False, statistics(scaler, ratio=ratio)) for ratio in (1.2, 1.2, None, 1.0, 0.2)]
    assert found == [8, 16, 16, 16, 16]


def test_norm_ratio_keeps_the_result_of_a_probe_until_it_may_move():
    scaler = NormRatioGradScaler(4.0, update_every=3)
    found = [scaler.update(False, statistics(scaler, flushed=value)) for value in (0.5, None, None, None)]
    assert found == [4, 4, 8, 8]


def test_norm_ratio_ends_between_loss_and_overflow():
    scaler = NormRatioGradScaler(2.0, probe_every=2)
    overflows, scaled = simulate(scaler, [1e-3] * 400, lossless_from=2.0**9)
    assert not overflows
    assert 2.0**9 <= scaled[-1] < 2.0**10


def test_max_norm_rises_above_the_target_where_gradients_are_lost_but_not_into_overflow():
    amax = 2.0**-10 * 1.1
    plain, floored = MaxValueGradScaler(), MaxNormGradScaler(probe_every=5)
    assert (
        simulate(plain, [amax] * 300)[0] == simulate(floored, [amax] * 300, lossless_from=OVERFLOW)[0] == []
    )
    assert plain.scale == 2.0**24
    assert floored.scale == 2.0**25  # 2^26 would overflow


def test_an_overflow_takes_the_floor_of_max_norm_down():
    scaler = MaxNormGradScaler(probe_every=1)
    amax = 2.0**-10 * 1.1
    simulate(scaler, [amax] * 50, lossless_from=OVERFLOW)
    high = scaler.scale
    scaler.update(True)
    assert scaler.state_dict()["floor"] == math.log2(high) - 1
    assert [scaler.update(False, statistics(scaler, amax)) for _ in range(5)] == [high / 2] * 5


def test_controller_moves_by_its_share_of_the_clipped_error():
    scaler = ControllerGradScaler(2.0**10, gain=0.25, clip=2.0, dead_band=0.5)
    octave = 10.0
    for amax in (2.0**-3, 2.0**-1, 2.0**4.2, 2.0**9, 2.0**3.4, 1e-9):
        error = 15 - math.log2(amax * scaler.scale)
        if abs(error) > 0.5:
            octave += 0.25 * max(-2.0, min(2.0, error))
        assert scaler.update(False, statistics(scaler, amax)) == 2.0 ** math.floor(octave)


def test_controller_rests_within_its_dead_band():
    scaler = ControllerGradScaler()
    _, scaled = simulate(scaler, [3.3e-4] * 200)
    assert len(set(scaled[50:])) == 1
    assert abs(15 - math.log2(scaled[-1])) <= 0.5


def test_controller_at_a_bound_does_not_accumulate_error():
    scaler = ControllerGradScaler(max_scale=2.0**16)
    simulate(scaler, [1e-9] * 100)
    scaler.update(False, statistics(scaler, 2.0**15))
    scaler.update(False, statistics(scaler, 2.0**15))
    assert scaler.scale < 2.0**16


def test_controller_corrects_the_mean_error_of_the_steps_between_moves():
    scaler = ControllerGradScaler(2.0**10, update_every=2)
    for amax in (2.0**3, 2.0**5):  # errors 2 and 0
        scaler.update(False, statistics(scaler, amax))
    assert scaler.state_dict()["octave"] == 10.5


EVENTS = st.lists(
    st.tuples(st.booleans(), st.floats(1e-9, 1e3), st.one_of(st.none(), st.floats(0.5, 2.0))), max_size=40
)


def replay(scaler, events):
    found = []
    for found_inf, amax, ratio in events:
        found.append((scaler.wants_probe, scaler.update(found_inf, statistics(scaler, amax, ratio))))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@steady
@given(before=EVENTS, after=EVENTS, update_every=st.integers(1, 3))
def test_a_resumed_strategy_continues_exactly(strategy, before, after, update_every):
    arguments = {"update_every": update_every, "growth_interval": 3}
    arguments |= {"probe_every": 2} if strategy in {NormRatioGradScaler, MaxNormGradScaler} else {}
    whole, later = strategy(**arguments), strategy(8.0, **arguments)
    replay(whole, before)
    later.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert replay(later, after) == replay(whole, after)
    assert later.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("strategy", "arguments", "name"),
    [
        (MaxValueGradScaler, {"target": 65505}, "target"),
        (MaxValueGradScaler, {"target": 0}, "target"),
        (MaxValueGradScaler, {"ema_decay": 1}, "ema_decay"),
        (MaxValueGradScaler, {"ema_decay": -0.1}, "ema_decay"),
        (MaxNormGradScaler, {"ema_decay": math.nan}, "ema_decay"),
        (MaxNormGradScaler, {"epsilon": 0}, "epsilon"),
        (NormRatioGradScaler, {"epsilon": 1.0}, "epsilon"),
        (NormRatioGradScaler, {"probe_every": 0}, "probe_every"),
        (ControllerGradScaler, {"gain": 0.51}, "gain"),
        (ControllerGradScaler, {"clip": math.inf}, "clip"),
        (ControllerGradScaler, {"dead_band": 2.0}, "dead_band"),
        (ControllerGradScaler, {"update_every": True}, "update_every"),
    ],
)
def test_a_bad_argument_is_refused_by_name(strategy, arguments, name):
    with pytest.raises(UserError, match=f"^{name} must be"):
        strategy(**arguments)


NOT_NUMBERS = ["3", math.nan, math.inf, -math.inf, 10**400, [1], {}, torch.ones(2)]


@pytest.mark.parametrize(
    "strategy", [MaxValueGradScaler, NormRatioGradScaler, MaxNormGradScaler, ControllerGradScaler]
)
def test_a_damaged_state_is_refused_and_changes_nothing(strategy):
    scaler = strategy(growth_interval=5)
    for index in range(12):
        figures = {"amax": 2.0**-index, "norm_ratio": 1.5, "flushed_fraction": 0.0}
        scaler.update(index == 6, GradientStatistics(loss_scale=scaler.scale, **figures))
    before = scaler.state_dict()
    for key in before.keys() - {"strategy"}:
        is_optional = {**strategy.COMMON_STATE, **strategy.STATE}.get(key, 0) is None
        for value in [*NOT_NUMBERS, True, *([] if is_optional else [None])]:
            if key == "is_losing" and value is True:
                continue
            state = {**before, "steps": 99, key: value}
            for load in (scaler.check_state_dict, scaler.load_state_dict):
                with pytest.raises(UserError, match=f"^{key} of the loaded grad scaler state must be"):
                    load(state)
                assert scaler.state_dict() == before
    for damaged in ({"ceiling": 1.5}, {"ceiling": 10**9}, {"steps": -1}, {"since_move": 0.5}, {"scale": 0.0}):
        with pytest.raises(UserError, match="of the loaded grad scaler state must be"):
            scaler.load_state_dict({**before, **damaged})
    scaler.check_state_dict({**before, "scale": 2.0**40})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("strategy", [NormRatioGradScaler, MaxNormGradScaler])
def test_both_probing_strategies_check_and_keep_their_probes_alike(strategy):
    scaler = strategy(epsilon=0.25, probe_every=3)
    assert (scaler.epsilon, scaler.probe_every, scaler.probes) == (0.25, 3, True)
    wants = []
    for _ in range(5):
        wants.append(scaler.wants_probe)
        scaler.update(False)
    assert wants == [True, False, False, True, False]
    for arguments in ({"epsilon": 0.0}, {"epsilon": 1.0}, {"probe_every": 0}, {"probe_every": True}):
        with pytest.raises(UserError, match=f"^{next(iter(arguments))} must be"):
            strategy(**arguments)
