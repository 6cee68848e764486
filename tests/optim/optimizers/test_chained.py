"""Several optimizers in one process; tests/distributed/test_overflow.py tests several ranks."""

import copy
import math
import pickle

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.statistics.layer_scaling import LayerScaling

KINDS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "plain": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


def optimizer_of(parameters, scaler=None, kind="fused", **options):
    return Float16OptimizerWithFloat16Params(
        KINDS[kind](parameters), grad_scaler=scaler, bf16=scaler is None, cast_parameters=True,
        **{"clip_grad": 0.0, **options},
    )  # fmt: skip


def chain_of(*, kinds=("fused", "fused"), scaler=None, **options):
    """Two parameters, one in each of two chained optimizers."""
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    each = [
        optimizer_of([p], scaler, kind, named_parameters=[(f"part{index}", p)], **options)
        for index, (p, kind) in enumerate(zip(parameters, kinds, strict=True))
    ]
    return parameters, ChainedOptimizer(each)


def states_of(chain):
    return [v for each in chain.chained_optimizers for state in each.state.values() for v in state.values()]


def fill(parameters, *values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.main_grad.fill_(value)


@pytest.mark.parametrize("kinds", [("fused", "fused"), ("fused", "plain"), ("plain", "plain")])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_in_one_skips_all_and_backs_off_once(kinds, bad, place):
    parameters, chain = chain_of(kinds=kinds, scaler=DynamicGradScaler(64.0, hysteresis=1))
    fill(parameters, 1.0, 1.0)
    assert chain.step().is_applied
    before = [p.detach().clone() for p in parameters]
    state = [
        value.clone()
        for each in chain.chained_optimizers
        for s in each.state.values()
        for value in s.values()
    ]
    fill(parameters, 1.0, 1.0)
    parameters[place].main_grad[1] = bad
    report = chain.step()
    assert report == (False, None, None)
    assert str(report) == f"skipped at loss scale 64: overflow in part{place} on rank 0"
    assert chain.loss_scale == 32.0
    after = states_of(chain)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    assert not any(p.main_grad.any() for p in parameters)
    assert all(each.report is report for each in chain.chained_optimizers)


@pytest.mark.parametrize("kinds", [("fused", "fused"), ("plain", "fused")])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_a_chain_steps_as_one_optimizer_over_all_parameters_does(kinds, clip_grad):
    starts = [torch.randn(2), torch.randn(3)]
    parameters, chain = chain_of(kinds=kinds, scaler=ConstantGradScaler(8.0), clip_grad=clip_grad)
    masters = [each.master_of(p) for each, p in zip(chain.chained_optimizers, parameters, strict=True)]
    references = [torch.nn.Parameter(start.clone()) for start in starts]
    for master, start in zip(masters, starts, strict=True):
        master.data.copy_(start)
    inner = [KINDS[kind]([p]) for kind, p in zip(kinds, references, strict=True)]
    for step in range(3):
        gradients = [torch.randn(2) * (step + 1), torch.randn(3)]
        for p, reference, gradient in zip(parameters, references, gradients, strict=True):
            p.main_grad.copy_(gradient * 8)
            reference.grad = gradient.clone()
        exact = float(torch.cat(gradients).double().norm())
        if clip_grad:
            torch.nn.utils.clip_grad_norm_(references, clip_grad)
        for each in inner:
            each.step()
        report = chain.step()
        assert report.grad_norm == pytest.approx(exact, rel=1e-6)
    for master, reference in zip(masters, references, strict=True):
        torch.testing.assert_close(master.detach(), reference.detach(), rtol=1e-5, atol=1e-6)


def test_sums_of_norms_and_zeros_are_added_up():
    parameters, chain = chain_of(gradient_norm="sum_of_norms", log_num_zeros_in_grad=True)
    fill(parameters, 0.0, 0.0)
    parameters[0].main_grad[0] = 3.0
    parameters[1].main_grad[:2] = torch.tensor([3.0, 4.0])
    assert chain.step() == (True, 8.0, 2)


def test_several_optimizers_may_share_the_buffers_of_a_local_ddp():
    from megalowbit.optim.local_ddp import LocalDDP

    model = LocalDDP(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)))
    chain = ChainedOptimizer(
        [FP32Optimizer(torch.optim.SGD(part.parameters(), lr=1.0), clip_grad=0.0) for part in model.module]
    )
    twin = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    twin.load_state_dict(model.state_dict())
    inner = torch.optim.SGD(twin.parameters(), lr=1.0)
    x = torch.randn(4, 3)
    for bad in (False, True, False):
        model(x).square().mean().backward()
        if bad:
            model.module[1].bias.main_grad[0] = math.inf
        model.allreduce_gradients()
        assert chain.step().is_applied != bad
        if not bad:
            inner.zero_grad()
            twin(x).square().mean().backward()
            inner.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("place", [0, 1])
def test_a_strategy_receives_the_largest_gradient_of_all_optimizers(place):
    scaler = MaxValueGradScaler(4.0, ema_decay=0.0)
    parameters, chain = chain_of(scaler=scaler)
    for _ in range(20):
        factors = [2.0**-4, 2.0**-4]
        factors[place] = 3.0
        loss = sum((p.float() * factor).sum() for p, factor in zip(parameters, factors, strict=True))
        chain.scale_loss(loss).backward()
        assert chain.step().is_applied
    assert chain.loss_scale == 2.0**13  # the largest power of two that brings 3 to 2¹⁵ or below


def test_factors_shared_by_a_chain_move_once_a_step():
    def train(is_chained):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3))).half()
        scaling = LayerScaling(model, ["0", "1"])
        groups = [model[:1], model[1:]] if is_chained else [model]
        scaler, instruments = ConstantGradScaler(1.0), Instruments(layer_scaling=scaling)
        chain = ChainedOptimizer(
            [
                Float16OptimizerWithFloat16Params(
                    torch.optim.SGD(part.parameters(), lr=0.1), clip_grad=0.0, grad_scaler=scaler,
                    instruments=instruments,
                )
                for part in groups
            ]
        )  # fmt: skip
        seen = []
        for number in range(8):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).half()
            chain.scale_loss(model(x).float().square().mean()).backward()
            chain.step()
            seen.append(scaling.state_dict())
        return seen, [p.tolist() for p in model.parameters()]

    one, several = train(False), train(True)
    assert one == several
    assert max(block["octaves"] for block in one[0][-1]["blocks"].values()) == 8


def test_a_learning_rate_written_to_a_group_is_used_and_zero_grad_clears_all():
    parameters, chain = chain_of()
    assert len(chain.param_groups) == 2
    chain.param_groups[1]["lr"] = 0.0
    fill(parameters, 1.0, 1.0)
    chain.step()
    assert parameters[0].any()
    assert not parameters[1].any()
    fill(parameters, 1.0, 1.0)
    chain.zero_grad()
    assert not any(p.main_grad.any() for p in parameters)


def test_torchs_schedulers_take_a_chain_and_write_to_all_its_groups():
    parameters, chain = chain_of(kinds=("plain", "fused"))
    twin = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=0.1)
    schedulers = [
        [
            torch.optim.lr_scheduler.LinearLR(each, 0.5, total_iters=2),
            torch.optim.lr_scheduler.LambdaLR(each, [lambda step: 0.5**step, lambda step: 1 / (1 + step)]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=0),
        ]
        for each in (chain, twin)
    ]
    reports = []
    chain.register_step_post_hook(lambda optimizer, *_: reports.append(optimizer.report))
    for loss in (1.0, 1.0, 2.0):
        fill(parameters, 1.0, 1.0)
        assert chain.step() is reports[-1]
        twin.step()
        for warm_up, decay, on_plateau in schedulers:
            warm_up.step()
            decay.step()
            on_plateau.step(loss)
        rates = [group["lr"] for each in chain.chained_optimizers for group in each.param_groups]
        assert rates == [group["lr"] for group in twin.param_groups]
    assert len(reports) == 3
    before = [p.detach().clone() for p in parameters]
    for group in chain.param_groups:
        group["lr"] = 0.0
    fill(parameters, 1.0, 1.0)
    chain.step()
    assert all(torch.equal(old, p) for old, p in zip(before, parameters, strict=True))


def test_a_chain_has_the_groups_and_states_of_its_optimizers():
    parameters, chain = chain_of()
    fill(parameters, 1.0, 1.0)
    chain.step()
    masters = [each.master_of(p) for each, p in zip(chain.chained_optimizers, parameters, strict=True)]
    assert [group["params"] for group in chain.param_groups] == [[master] for master in masters]
    assert set(chain.state) == set(masters)
    for each, master in zip(chain.chained_optimizers, masters, strict=True):
        assert chain.state[master] is each.state[master]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_chain_is_neither_copied_nor_extended(way):
    parameters, chain = chain_of()
    with pytest.raises(UserError, match="ChainedOptimizer cannot be copied or pickled"):
        way(chain)
    with pytest.raises(UserError, match="add_param_group: parameters cannot be added later"):
        chain.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert len(chain.param_groups) == 2
    fill(parameters, 1.0, 1.0)
    assert chain.step().is_applied


def test_a_closure_is_called_before_the_step():
    parameters, chain = chain_of()
    assert chain.step(lambda: fill(parameters, 1.0, 1.0)).grad_norm > 0


def bits_of(chain, parameters):
    return [
        [p.detach().clone() for p in parameters],
        [master.detach().clone() for group in chain.param_groups for master in group["params"]],
        [value.clone() for value in states_of(chain)],
        chain.grad_scaler.state_dict(),
    ]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("part", ["optimizer", "grad_scaler", "fp32_from_fp16_params", "moment"])
def test_a_state_that_does_not_fit_one_changes_none(place, part):
    parameters, chain = chain_of(scaler=DynamicGradScaler(4.0, growth_interval=2))
    fill(parameters, 1.0, -1.0)
    chain.step()
    saved = copy.deepcopy(chain.state_dict())
    fill(parameters, 3.0, 2.0)
    chain.step()
    before = bits_of(chain, parameters)
    if part == "moment":
        saved[place]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(7)
    elif part == "grad_scaler":
        saved[place][part]["scale"] = math.nan
    else:
        saved[place][part] = []
    with pytest.raises(UserError):
        chain.load_state_dict(saved)
    for old, new in zip(before[:3], bits_of(chain, parameters)[:3], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert chain.grad_scaler.state_dict() == before[3]


def test_a_state_continues_the_run_bit_for_bit():
    runs = []
    for is_interrupted in (False, True):
        parameters, chain = chain_of(scaler=DynamicGradScaler(4.0, growth_interval=2))
        for step in range(6):
            if step == 3 and is_interrupted:
                state = chain.state_dict()
                parameters, chain = chain_of(scaler=DynamicGradScaler(4.0, growth_interval=2))
                chain.load_state_dict(state)
            fill(parameters, step + 1.0, -1.0)
            chain.step()
        runs.append([*(p.tolist() for p in parameters), chain.loss_scale])
    assert runs[0] == runs[1]
    with pytest.raises(UserError, match="the state has 1 chained optimizers, but there are 2"):
        chain.load_state_dict(state[:1])


def test_reloading_takes_the_masters_from_changed_models():
    parameters, chain = chain_of()
    for parameter in parameters:
        parameter.data.fill_(2.0)
    chain.reload_model_params()
    for each, parameter in zip(chain.chained_optimizers, parameters, strict=True):
        assert torch.equal(each.master_of(parameter), torch.full_like(parameter, 2.0, dtype=torch.float32))


def two(**options):
    """Two optimizers whose second has other options."""
    scaler = options.pop("scaler", None)
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return [optimizer_of([first]), optimizer_of([second], scaler, **options)]


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (list, "at least one"),
        (lambda: two(scaler=ConstantGradScaler(1.0)), "different grad scalers"),
        (lambda: two(clip_grad=1.0), r"differ in clip_grad: 0.0 and 1.0"),
        (lambda: two(gradient_norm="sum_of_norms"), "differ in gradient_norm"),
        (lambda: two(log_num_zeros_in_grad=True), "differ in log_num_zeros_in_grad"),
        (lambda: two(training_group=object()), "differ in training_group"),
        (lambda: two()[:1] * 2, "a parameter is in two"),
    ],
)
def test_optimizers_that_could_not_step_as_one_are_refused(optimizers, message, monkeypatch):
    monkeypatch.setattr("megalowbit.distributed.process_group.rank", lambda group=None: 0)
    with pytest.raises(UserError, match=message):
        ChainedOptimizer(optimizers())


def test_a_model_parameter_with_masters_in_two_of_them_is_refused():
    shared = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="a parameter is in two of the chained optimizers"):
        ChainedOptimizer([optimizer_of([shared]), optimizer_of([shared])])
