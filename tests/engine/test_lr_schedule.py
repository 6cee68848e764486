"""`"lr_schedule"` in an engine: ZeRO stages, skipped steps, resume, and settings that it excludes."""

import logging

import pytest
import torch
from small_engines import ADAMW, config, make_engine, model, step

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError
from megalowbit.optim.schedules.factors import WSDSchedule

WSD = {"type": "wsd", "warmup_steps": 2, "decay_steps": 3, "total_steps": 6, "min_lr_ratio": 0.1}
FACTORS = [WSDSchedule(**WSD).factor(each) for each in range(8)]
# stages 1 and 2 use the same DeepSpeed class
STAGES = pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])


def rates(engine):
    return [group["lr"] for group in engine.optimizer.param_groups]


def weights(engine):
    """The full masters; a single process holds all of them."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [each.detach().clone() for group in inner.param_groups for each in group["params"]]


@STAGES
def test_each_step_uses_the_learning_rate_of_the_schedule(stage):
    engine = make_engine(stage, lr_schedule=WSD)
    seen = []
    for number in range(8):
        seen.append(rates(engine))
        step(engine, number)
    assert seen == [[0.1 * factor] * len(seen[0]) for factor in FACTORS]


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_first_step_without_a_rate_is_warned_about(caplog, is_ours):
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}}
    settings = config()
    if is_ours:
        settings["megalowbit"]["lr_schedule"] = WSD
    else:
        settings["scheduler"] = warmup
    with caplog.at_level(logging.WARNING, logger="megalowbit.engine.initialize"):
        engine, *_ = initialize(model=model(), config=settings)
    assert (rates(engine)[0] == 0) is not is_ours
    said = [each for each in caplog.messages if each.startswith("the learning rate of the first step is 0")]
    assert len(said) == (0 if is_ours else 1)


@STAGES
def test_a_skipped_step_does_not_advance_the_schedule(stage):
    scaler = {"type": "constant", "scale": 8.0}
    engine = make_engine(stage, precision="fp16", grad_scaler=scaler, lr_schedule={**WSD, "warmup_steps": 3})
    x = torch.randn(2, 16, dtype=torch.float16)
    for value in (1.0, float("inf"), 1.0):
        before = rates(engine)
        engine.backward(engine(x).float().square().mean() * value)
        engine.step()
        assert (rates(engine) == before) is (value == float("inf"))
    assert engine.lr_scheduler.num_steps == 2


@STAGES
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stage, tmp_path):
    whole = make_engine(stage, lr_schedule=WSD)
    for number in range(3):
        step(whole, number)
    whole.save_checkpoint(str(tmp_path), tag="three")
    resumed = make_engine(stage, lr_schedule=WSD, seed=1)
    resumed.load_checkpoint(str(tmp_path), tag="three")
    assert rates(resumed) == rates(whole)
    for number in range(3, 6):
        assert step(resumed, number) == step(whole, number)
        assert rates(resumed) == rates(whole)
    for one, other in zip(weights(resumed), weights(whole), strict=True):
        assert torch.equal(one, other)


@STAGES
def test_a_resumed_run_may_have_another_number_of_steps(stage, tmp_path):
    whole = make_engine(stage, lr_schedule=WSD)
    for number in range(3):
        step(whole, number)
    whole.save_checkpoint(str(tmp_path), tag="three")
    sooner = WSD | {"total_steps": 5}
    resumed = make_engine(stage, lr_schedule=sooner)
    resumed.load_checkpoint(str(tmp_path), tag="three")
    factor = WSDSchedule(**sooner).factor(3)
    assert factor != FACTORS[3]
    assert rates(resumed) == [0.1 * factor] * len(rates(resumed))


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path):
    engine = make_engine(lr_schedule=WSD)
    step(engine, 0)
    engine.save_checkpoint(str(tmp_path), tag="one")
    other = make_engine(lr_schedule={"type": "constant", "warmup_steps": 2})
    with pytest.raises(UserError, match=r"lr_schedule.type was 'wsd' in the checkpoint and is 'constant'"):
        other.load_checkpoint(str(tmp_path), tag="one")


@STAGES
def test_a_checkpoint_without_a_schedule_is_refused_at_every_stage(stage, tmp_path):
    engine = make_engine(1)
    step(engine, 0)
    engine.save_checkpoint(str(tmp_path), tag="one")
    with pytest.raises(UserError, match=r"lr_schedule.type was another library's, or none"):
        make_engine(stage, lr_schedule=WSD).load_checkpoint(str(tmp_path), tag="one")


def test_groups_of_the_user_keep_the_ratio_of_their_learning_rates():
    net = model()
    groups = [{"params": [net[0].weight], "lr": 0.1}, {"params": [net[2].weight], "lr": 0.3}]
    settings = config(megalowbit={"precision": "bf16", "lr_schedule": WSD})
    engine, _, _, scheduler = initialize(model=net, config=settings, model_parameters=groups)
    assert rates(engine) == [0.1 * FACTORS[0], 0.3 * FACTORS[0]]
    assert scheduler is engine.lr_scheduler
    assert scheduler.max_lrs == [0.1, 0.3]


def test_the_caller_sets_the_total_number_of_steps():
    section = {"type": "cosine", "total_steps": "auto"}
    settings = config(megalowbit={"precision": "bf16", "lr_schedule": section})
    engine, *_ = initialize(model=model(), config=settings, total_steps=10)
    assert engine.lr_scheduler.schedule.total_steps == 10
    with pytest.raises(UserError, match=r"^megalowbit.lr_schedule.total_steps = 'auto' needs the number"):
        initialize(model=model(), config=settings)


def test_two_schedules_are_refused():
    block = {"precision": "bf16", "lr_schedule": WSD}
    stock = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    with pytest.raises(UserError, match=r"^scheduler and megalowbit.lr_schedule both set the learning rate"):
        initialize(model=model(), config=config(megalowbit=block, scheduler=stock, optimizer=ADAMW))

    def make(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with pytest.raises(UserError, match=r"^lr_scheduler and megalowbit.lr_schedule both set the learning"):
        initialize(model=model(), config=config(megalowbit=block), lr_scheduler=make)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_scheduler_that_steps_by_a_metric_gets_it_or_refuses(stage):
    """DeepSpeed alone would pass the batch size as the metric, and lower the learning rate at every step."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    settings = config(zero_optimization={"stage": stage})
    engine, _, _, scheduler = initialize(
        model=model(), config=settings, lr_scheduler=lambda optimizer: plateau(optimizer, patience=0)
    )
    assert isinstance(scheduler, plateau)
    rates = []
    for metric in (3.0, 2.0, 2.0, 1.0):
        engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).sum())
        engine.step(lr_kwargs={"metrics": metric})
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert scheduler.best == 1.0
    engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).sum())
    with pytest.raises(UserError, match=r"ReduceLROnPlateau.step\(metrics.* call engine.step\(lr_kwargs="):
        engine.step()
    assert type(scheduler) is plateau  # of a class that can be pickled
    assert "step" not in scheduler.state_dict()
    engine.step(lr_kwargs={"metrics": 1.0})  # the refused step has changed nothing
    assert engine.global_steps == 5


class StepsByEpoch:
    """A scheduler like those of timm, whose `step` needs the epoch."""

    def __init__(self):
        self.epochs = []

    def step(self, epoch, metric=None):
        self.epochs.append(epoch)

    def get_last_lr(self):
        return [0.01]


def test_a_scheduler_that_steps_by_the_epoch_does_not_get_the_batch_size():
    scheduler = StepsByEpoch()
    engine = initialize(model=model(), config=config(), lr_scheduler=scheduler)[0]
    engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).sum())
    for arguments in (None, {"metric": 3.0}, {"epochs": 1}):
        with pytest.raises(UserError, match=r"^StepsByEpoch.step\(epoch, metric=None\) can't be called with"):
            engine.step(lr_kwargs=arguments)
    engine.step(lr_kwargs={"epoch": 7})
    assert scheduler.epochs == [7]
