import json

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.schedules.factors import ConstantSchedule, CosineSchedule, WSDSchedule
from megalowbit.optim.schedules.scheduler import LRScheduler

WSD = WSDSchedule(total_steps=12, warmup_steps=4, decay_steps=4)


def optimizer(*rates, **settings):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, **settings)


def rates(of):
    return [float(group["lr"]) for group in of.param_groups]


def test_the_first_step_has_the_first_rate_and_each_step_the_next():
    inner = optimizer(0.1)
    scheduler = LRScheduler(inner, WSD)
    seen = []
    for _ in range(13):
        seen += rates(inner)
        scheduler.step()
    assert seen == [0.1 * WSD.factor(step) for step in range(13)]


def test_groups_keep_their_ratios():
    inner = optimizer(0.1, 0.4)
    scheduler = LRScheduler(inner, WSD)
    assert scheduler.max_lrs == [0.1, 0.4]
    for _ in range(9):
        scheduler.step()
        assert rates(inner) == scheduler.get_last_lr()
        assert rates(inner)[1] == pytest.approx(4 * rates(inner)[0])


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    rate = torch.tensor(0.5)
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    LRScheduler(inner, WSD)
    assert inner.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_a_saved_schedule_continues_as_if_not_stopped():
    whole, halves = LRScheduler(optimizer(0.3), WSD), LRScheduler(optimizer(0.3), WSD)
    for _ in range(5):
        whole.step()
        halves.step()
    inner = optimizer(0.3)
    resumed = LRScheduler(inner, WSD)
    resumed.load_state_dict(json.loads(json.dumps(halves.state_dict())))
    for _ in range(7):
        assert rates(inner) == resumed.get_last_lr() == whole.get_last_lr()
        whole.step()
        resumed.step()


def test_a_longer_schedule_of_the_same_type_takes_the_state():
    short = LRScheduler(optimizer(0.1), WSD)
    for _ in range(6):
        short.step()
    inner = optimizer(0.1)
    longer = LRScheduler(inner, WSD.model_copy(update={"total_steps": 100}))
    longer.load_state_dict(short.state_dict())
    assert rates(inner) == [0.1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"type": "cosine", "num_steps": 3}, "type was 'cosine' in the checkpoint and is 'wsd' now"),
        ({"last_batch_iteration": 3}, "type was another library's, or none in the checkpoint"),
        (None, "type was another library's, or none"),
        ({"type": "wsd"}, "num_steps of the loaded schedule is None"),
        ({"type": "wsd", "num_steps": -1}, "num_steps of the loaded schedule is -1"),
        ({"type": "wsd", "num_steps": True}, "num_steps of the loaded schedule is True"),
    ],
)
def test_a_state_of_another_schedule_is_refused_and_changes_nothing(state, message):
    inner = optimizer(0.1)
    scheduler = LRScheduler(inner, WSD)
    scheduler.step()
    with pytest.raises(UserError, match=message):
        scheduler.load_state_dict(state)
    assert (scheduler.num_steps, rates(inner)) == (1, [0.1 * WSD.factor(1)])


def test_the_state_names_type_and_steps_only():
    scheduler = LRScheduler(optimizer(0.1), ConstantSchedule(warmup_steps=2))
    scheduler.step()
    assert scheduler.state_dict() == {"type": "constant", "num_steps": 1}


def test_beyond_its_end_a_schedule_stays_at_the_minimum():
    inner = optimizer(2.0)
    scheduler = LRScheduler(inner, CosineSchedule(total_steps=3, min_lr_ratio=0.25))
    for _ in range(50):
        scheduler.step()
    assert rates(inner) == [0.5]
