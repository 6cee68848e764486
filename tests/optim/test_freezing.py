"""Parameters frozen or unfrozen while an optimizer exists move as with torch, or there is an error."""

import copy

import pytest
import torch

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

KINDS = ["fp32", "fp32 .grad", "bf16", "megatron fp32", "megatron bf16", "plain", "SGD", "LocalDDP"]
SETTINGS = {"lr": 0.05, "weight_decay": 0.1}
REMEDY = r"was frozen when the optimizer was built, .*: build the optimizer again, or leave .* lr 0"


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def make(kind):
    """A model, its optimizer, and torch's optimizer over a float64 copy with the same update rule."""
    model = net().bfloat16() if "bf16" in kind else net()
    twin = copy.deepcopy(model).double()
    if kind.startswith("megatron"):
        config = mlb.OptimizerConfig(**SETTINGS, clip_grad=0.0, bf16="bf16" in kind)
        optimizer = mlb.get_megatron_optimizer(model, config, no_weight_decay_cond=lambda *_: False)
        return model, optimizer, twin, torch.optim.AdamW(twin.parameters(), **SETTINGS)
    if kind == "SGD":
        inner, other = (
            torch.optim.SGD(each.parameters(), momentum=0.9, fused=True, **SETTINGS) for each in (model, twin)
        )
    else:
        how = {"foreach": True} if kind == "plain" else {}
        inner = torch.optim.AdamW(model.parameters(), **SETTINGS, **how)
        other = torch.optim.AdamW(twin.parameters(), **SETTINGS)
    wrapped = LocalDDP(model) if kind == "LocalDDP" else model
    if kind == "bf16":
        optimizer = Float16OptimizerWithFloat16Params(inner, grad_scaler=None, bf16=True, clip_grad=0.0)
    else:
        optimizer = FP32Optimizer(inner, clip_grad=0.0, params_have_main_grad=kind != "fp32 .grad")
    return wrapped, optimizer, twin, other


def backward(model, seed):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()


def train(model, optimizer, steps):
    for seed in range(steps):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [parameter.detach().clone() for parameter in getattr(model, "module", model).parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_frozen_between_steps_stays_where_it_is_and_continues_as_in_torch(kind):
    model, optimizer, twin, other = make(kind)
    train(model, optimizer, 3)
    train(twin, other, 3)
    before = weights(model)
    for is_trained in (False, True):
        for each in (getattr(model, "module", model), twin):
            each[0].requires_grad_(is_trained)
        train(model, optimizer, 4)
        train(twin, other, 4)
        if not is_trained:
            now = weights(model)
            assert all(map(torch.equal, now[:2], before[:2]))
            assert not any(map(torch.equal, now[2:], before[2:]))
    # moments and step counts have rested, too
    limit = 0.1 if "bf16" in kind else 1e-4
    for ours, theirs in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_from_before_the_freeze_is_applied(kind):
    model, optimizer, twin, other = make(kind)
    for each, stepped in ((model, optimizer), (twin, other)):
        train(each, stepped, 2)
        backward(each, 5)
        getattr(each, "module", each)[0].requires_grad_(False)
        backward(each, 6)
        stepped.step()
    limit = 0.05 if "bf16" in kind else 1e-4
    for ours, theirs in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


def test_a_gradient_set_by_hand_on_a_frozen_parameter_is_applied():
    model, optimizer, *_ = make("fp32")
    model[0].requires_grad_(False)
    before = weights(model)
    backward(model, 0)
    model[0].weight.grad = torch.ones(5, 6)
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[0].bias, before[1])


def test_frozen_elements_are_no_zeros_of_the_gradient():
    model = net()
    optimizer = FP32Optimizer(
        torch.optim.AdamW(model.parameters()), clip_grad=0.0, log_num_zeros_in_grad=True
    )
    model[0].requires_grad_(False)
    backward(model, 0)
    assert optimizer.step().num_zeros == 0


def test_what_other_code_writes_to_a_frozen_main_grad_does_not_wait_for_a_later_step():
    model, optimizer, *_ = make("fp32")
    model[0].requires_grad_(False)
    backward(model, 0)
    model[0].weight.main_grad.fill_(3.0)
    optimizer.step()
    assert not model[0].weight.main_grad.any()


def test_main_grads_of_other_code_are_not_applied_to_frozen_parameters():
    model = net()
    for parameter in model.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    optimizer = FP32Optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), clip_grad=0.0)
    model[0].requires_grad_(False)
    before = weights(model)
    assert optimizer.step().is_applied
    assert [torch.equal(a, b) for a, b in zip(weights(model), before, strict=True)] == [True] * 2 + [
        False
    ] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_unfrozen_later_is_an_error_that_names_it(kind, monkeypatch):
    build = net
    monkeypatch.setitem(globals(), "net", lambda: freeze_first(build()))
    model, optimizer, *_ = make(kind)
    train(model, optimizer, 2)
    inner = getattr(model, "module", model)
    inner[0].weight.requires_grad_(True)
    before = weights(model)
    backward(model, 0)
    name = r"^0\.weight" if kind.startswith("megatron") else "^parameter 0 of group 0"
    with pytest.raises(UserError, match=name + " requires a gradient, but " + REMEDY):
        optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    inner[0].weight.requires_grad_(False)
    assert optimizer.step().is_applied


def freeze_first(model):
    model[0].requires_grad_(False)
    return model


def test_an_unfrozen_parameter_is_an_error_of_chained_optimizers():
    model = freeze_first(net())
    model[2].bias.allreduce = False  # an expert
    group = torch.distributed.group.WORLD  # None in a single process
    config = mlb.OptimizerConfig(lr=0.1, clip_grad=0.0)
    optimizer = mlb.get_megatron_optimizer(model, config, expert_parallel_group=group)
    model[0].bias.requires_grad_(True)
    backward(model, 0)
    with pytest.raises(UserError, match=r"^0\.bias requires a gradient"):
        optimizer.step()
