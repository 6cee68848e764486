"""A state that fits only in part changes nothing. Copies, pickles and late groups are rejected."""

import copy
import math
import pickle

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.statistics.layer_scaling import LayerScaling

SCALERS = {
    "dynamic": lambda: DynamicGradScaler(2.0**8, growth_interval=3),
    "max_value": lambda: MaxValueGradScaler(2.0**8),
    "max_norm": lambda: MaxNormGradScaler(2.0**8, probe_every=1),
}


def built(scaler="dynamic", inner=torch.optim.AdamW):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).half()
    scaler = SCALERS[scaler]()
    attached = Instruments.attach(model, scaler)
    instruments = Instruments(probe=attached.probe, layer_scaling=LayerScaling(model, ["0", "1"]))
    if attached.watch is not None:
        attached.watch.detach()
    optimizer = Float16OptimizerWithFloat16Params(
        inner(model.parameters(), lr=0.01, **({"momentum": 0.9} if inner is torch.optim.SGD else {})),
        grad_scaler=scaler, clip_grad=1.0, instruments=instruments,
    )  # fmt: skip
    return model, optimizer


def train(model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).half()
        optimizer.scale_loss(model(x).float().square().mean() * 2.0**-6).backward()
        assert optimizer.step().is_applied


def everything(model, optimizer):
    """The bits of everything that loading could change."""
    masters = [optimizer.master_of(p).detach() for p in model.parameters()]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    tensors = [*model.parameters(), *masters]
    live = [optimizer.state_of(p) for p in model.parameters()]
    return copy.deepcopy(
        [
            [t.detach().double().tolist() for t in tensors],
            [{name: value.tolist() for name, value in one.items()} for one in live],
            groups,
            optimizer.grad_scaler.state_dict(),
            optimizer.layer_scaling.state_dict(),
            optimizer.loss_scale,
        ]
    )


def first_block(state):
    return next(iter(state["layer_scaling"]["blocks"].values()))


DAMAGES = {
    "no scale": lambda s: s["grad_scaler"].pop("scale"),
    "scale NaN": lambda s: s["grad_scaler"].update(scale=math.nan),
    "scale of text": lambda s: s["grad_scaler"].update(scale="much"),
    "scaler a list": lambda s: s.update(grad_scaler=[1.0]),
    "factors a list": lambda s: s.update(layer_scaling=[1.0]),
    "factors of others": lambda s: s["layer_scaling"].update(blocks={"2": {}}),
    "octaves NaN": lambda s: first_block(s).update(octaves=math.nan),
    "octaves negative": lambda s: first_block(s).update(octaves=-1),
    "average infinite": lambda s: first_block(s).update(average=math.inf),
    "no steps": lambda s: s["layer_scaling"].pop("applied_steps"),
    "no inner": lambda s: s.pop("optimizer"),
    "inner None": lambda s: s.update(optimizer=None),
    "inner without groups": lambda s: s["optimizer"].pop("param_groups"),
    "group without parameters": lambda s: s["optimizer"]["param_groups"][0].pop("params"),
    "group too many": lambda s: s["optimizer"]["param_groups"].append({"params": []}),
    "group without lr": lambda s: s["optimizer"]["param_groups"][0].pop("lr"),
    "moment of another shape": lambda s: s["optimizer"]["state"][3].update(exp_avg=torch.zeros(5)),
    "moment missing": lambda s: s["optimizer"]["state"][3].pop("exp_avg_sq"),
    "state a list": lambda s: s["optimizer"].update(state=[1]),
    "no masters": lambda s: s.pop("fp32_from_fp16_params"),
    "last master of another shape": lambda s: s["fp32_from_fp16_params"][0].__setitem__(3, torch.zeros(5)),
    "master of text": lambda s: s["fp32_from_fp16_params"][0].__setitem__(3, "weights"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "scaler"),
    [
        pytest.param(damage, scaler, marks=() if (place + other) % 2 == 0 else pytest.mark.slow)
        for place, damage in enumerate(DAMAGES)
        for other, scaler in enumerate(SCALERS)
    ],
)
def test_a_state_that_is_bad_in_one_part_changes_nothing_in_any(scaler, damage):
    model, optimizer = built(scaler)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 8))
    before = everything(model, optimizer)
    DAMAGES[damage](saved)
    with pytest.raises(UserError) as refusal:
        optimizer.load_state_dict(saved)
    assert "\n" not in str(refusal.value)
    assert everything(model, optimizer) == before
    with pytest.raises(UserError):
        optimizer.check_state_dict(saved)
    train(model, optimizer, range(8, 10))  # and training continues


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_good_state_is_checked_without_being_taken_and_then_taken_wholly(scaler):
    model, optimizer = built(scaler)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    then = everything(model, optimizer)
    train(model, optimizer, range(3, 8))
    later = everything(model, optimizer)
    optimizer.check_state_dict(saved)
    assert everything(model, optimizer) == later != then
    optimizer.load_state_dict(saved)
    assert everything(model, optimizer) == then


def test_the_state_of_another_update_rule_changes_nothing():
    model, optimizer = built()
    train(model, optimizer, range(3))
    before = everything(model, optimizer)
    other, sgd = built(inner=torch.optim.SGD)
    train(other, sgd, range(2))
    with pytest.raises(UserError, match="SGD"):
        optimizer.load_state_dict(sgd.state_dict())
    assert everything(model, optimizer) == before


def test_moments_may_be_excluded_and_are_then_not_checked():
    model, optimizer = built()
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["optimizer"]["state"][0]["exp_avg"] = torch.zeros(99)
    other, fresh = built()
    fresh.load_state_dict(saved, load_optimizer_states=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not any(fresh.state_of(p) for p in other.parameters())
    assert fresh.loss_scale == optimizer.loss_scale


def fp32_optimizer():
    parameter = torch.nn.Parameter(torch.zeros(2))
    return FP32Optimizer(torch.optim.SGD([parameter], lr=1.0), clip_grad=0.0), parameter


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps, lambda o: copy.deepcopy({"a": [o]})])
@pytest.mark.parametrize("make", [lambda: built()[1], lambda: fp32_optimizer()[0]])
def test_an_optimizer_is_neither_copied_nor_pickled(way, make):
    optimizer = make()
    with pytest.raises(
        UserError, match=r"cannot be copied or pickled.*state_dict and load_state_dict"
    ) as refusal:
        way(optimizer)
    assert str(refusal.value).startswith(type(optimizer).__name__)
    assert "\n" not in str(refusal.value)


def test_adding_a_group_later_is_rejected_and_leaves_the_optimizer_unchanged():
    optimizer, parameter = fp32_optimizer()
    with pytest.raises(UserError, match="add_param_group: parameters cannot be added later") as refusal:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert "\n" not in str(refusal.value)
    assert len(optimizer.param_groups) == 1
    parameter.sum().backward()
    assert optimizer.step().is_applied
    assert parameter.tolist() == [-1.0, -1.0]
