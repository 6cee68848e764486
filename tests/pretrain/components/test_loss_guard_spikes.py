import json
import math
import random

import numpy as np
import pytest

from megalowbit.pretrain.components.loss_guard import LossGuardSettings, LossSpikes

WINDOW = LossGuardSettings().window


def healthy(steps, *, spread=0.1, seed=0):
    """A language model's loss: a steep start, a long flat end, noise of small batches with a tail upwards."""
    draw = random.Random(seed)
    return [
        (1.8 + 3.7 * math.exp(-step / 50) + 2 / math.sqrt(step + 10)) * math.exp(draw.gauss(0, spread))
        for step in range(steps)
    ]


def findings(losses, **settings):
    """What is said, by step."""
    spikes = LossSpikes(LossGuardSettings(**settings))
    found = {step: spikes.add(step, loss) for step, loss in enumerate(losses, start=1)}
    return (
        {step: each.spike for step, each in found.items() if each.spike is not None},
        {step: each.rise for step, each in found.items() if each.rise is not None},
        spikes,
    )


@pytest.mark.parametrize("spread", [0.005, 0.1, 0.3])
def test_healthy_losses_are_ignored(spread):
    spikes, rises, _ = findings(healthy(7000, spread=spread))
    assert len(spikes) <= 1
    assert not rises


def test_a_spike_is_detected_at_any_step():
    losses = healthy(1500)
    planted = [150, 200, 201, 700, 1400]
    for step in planted:
        losses[step - 1] *= 3
    spikes, rises, _ = findings(losses)
    assert sorted(spikes) == planted
    assert not rises


def test_deviations_are_those_of_log_losses_before_the_step():
    losses = healthy(300)
    losses[-1] = 9.0
    spikes, _, _ = findings(losses)
    before = np.log(losses[-1 - WINDOW : -1])
    middle = np.median(before)
    deviations = (np.log(9.0) - middle) / (1.4826 * np.median(np.abs(before - middle)))
    assert spikes == {
        300: f"loss 9 is {deviations:.3g} deviations above {np.exp(middle):.4g}, the median of the last 100 "
        "steps"
    }


def test_a_falling_loss_is_never_reported():
    losses = healthy(400)
    losses[300:] = [loss / 5 for loss in losses[300:]]
    assert findings(losses)[:2] == ({}, {})


def test_a_nearly_constant_loss_has_no_tiny_spikes():
    losses = [2.0 + 1e-5 * (step % 3) for step in range(300)]
    losses[200] = 2.005
    losses[250] = 2.1
    assert sorted(findings(losses)[0]) == [251]


def test_no_loss_is_judged_before_there_are_earlier_ones():
    assert findings([2.0] * 31 + [50.0])[0] == {}
    assert sorted(findings([2.0] * 32 + [50.0])[0]) == [33]


@pytest.mark.parametrize("over", [1, 100, 300])
def test_a_lasting_rise_is_detected_together_with_its_first_step(over):
    began, losses = 600, healthy(1400)
    losses[began:] = [
        loss * 1.5 ** min((step + 1) / over, 1) for step, loss in enumerate(losses[began:])
    ]  # half as much again, in one step or over many
    _, rises, _ = findings(losses)
    found = min(rises)
    assert began < found <= began + over + WINDOW
    assert rises[found].startswith("the loss has risen: ")
    _, _, spikes = findings(losses[:found])
    assert began - 2 * WINDOW < spikes.low_until <= began + 0.1 * over


def test_a_rise_is_reported_once_and_again_only_if_it_continues():
    losses = healthy(600)
    flat = losses[-200:]
    losses += [1.3 * loss for loss in flat * 3]
    _, rises, _ = findings(losses)
    assert len(rises) == 1
    losses += [2 * loss for loss in flat * 3]
    _, rises, _ = findings(losses)
    assert 2 <= len(rises) <= 3
    assert min(step for step in rises if step > 1200) < 1200 + WINDOW


def test_single_spikes_do_not_count_as_a_rise():
    losses = healthy(1000)
    losses[300::20] = [3 * loss for loss in losses[300::20]]
    spikes, rises, _ = findings(losses)
    assert len(spikes) >= 30
    assert not rises


@pytest.mark.parametrize("stop", [10, 90, 350, 651])
def test_a_restored_detector_finds_the_same_problems(stop):
    losses = healthy(600) + [1.5 * loss for loss in healthy(900, seed=1)[600:]]
    losses[400] *= 4
    whole = findings(losses)
    first = LossSpikes(LossGuardSettings())
    said = [first.add(step, losses[step - 1]) for step in range(1, stop + 1)]
    again = LossSpikes(LossGuardSettings())
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said += [again.add(step, losses[step - 1]) for step in range(stop + 1, 901)]
    assert {n: each.spike for n, each in enumerate(said, start=1) if each.spike} == whole[0]
    assert {n: each.rise for n, each in enumerate(said, start=1) if each.rise} == whole[1]
    assert whole[0]
    assert whole[1]
    assert again.state_dict() == whole[2].state_dict()


def test_a_window_of_another_length_continues_with_the_saved_losses():
    _, _, spikes = findings(healthy(500))
    shorter = LossSpikes(LossGuardSettings(window=40))
    shorter.load_state_dict(spikes.state_dict())
    assert len(shorter.state_dict()["losses"]) == 40
    longer = LossSpikes(LossGuardSettings(window=300))
    longer.load_state_dict(spikes.state_dict())
    for each in (shorter, longer):
        assert each.add(501, 50.0).spike is not None
        assert each.add(502, 2.0).spike is None


def test_a_loss_of_zero_is_valid():
    assert findings([0.0] * 200)[:2] == ({}, {})
