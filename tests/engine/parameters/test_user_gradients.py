"""Gradients that users clear or set mean the same at every ZeRO stage, in every precision."""

import copy
import pickle

import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from staged_engines import DTYPES, S, backward, every_stage, every_stage_and_precision, make, masters, same

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError

NO_BACKWARD = r"^engine.step\(\) before any backward: call engine.backward"

CLEARING = {
    "engine": lambda engine: engine.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "module, zeros": lambda engine: engine.module.zero_grad(set_to_none=False),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "optimizer, zeros": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
}


@every_stage_and_precision
def test_cleared_gradients_do_not_change_the_next_step(stage, precision):
    engine, twin = make(stage, precision), make(stage, precision)
    for seed, clear in enumerate(CLEARING.values()):
        backward(engine, 5.0, seed + 10)
        clear(engine)
        for one in (engine, twin):
            backward(one, 1.0, seed)
            one.step()
        assert engine.get_global_grad_norm() == twin.get_global_grad_norm()
        assert same(engine, twin)
        engine.zero_grad()  # as Trainer does after each step
        assert engine.was_step_applied()


@every_stage_and_precision
def test_gradients_cleared_between_micro_batches_do_not_change_the_next_step(stage, precision):
    engine, twin = make(stage, precision, micro_batches=2), make(stage, precision, micro_batches=2)
    for seed, clear in enumerate(CLEARING.values()):
        backward(engine, 5.0, seed + 10)
        engine.step()
        clear(engine)
        backward(twin, 0.0, seed + 10)
        twin.step()
        for one in (engine, twin):
            backward(one, 1.0, seed)
            one.step()
        assert engine.get_global_grad_norm() == twin.get_global_grad_norm()
        assert same(engine, twin)
    assert engine.global_steps == len(CLEARING)


@every_stage
def test_a_step_without_gradients_is_rejected_and_the_run_can_continue(stage):
    engine, twin = make(stage), make(stage)
    with pytest.raises(UserError, match=NO_BACKWARD):
        engine.step()
    for one in (engine, twin):
        backward(one)
        one.step()
    with pytest.raises(UserError, match=NO_BACKWARD):
        engine.step()
    backward(engine)
    engine.zero_grad()
    with pytest.raises(UserError, match=NO_BACKWARD):
        engine.step()
    for one in (engine, twin):
        backward(one, seed=1)
        one.step()
    assert same(engine, twin)


@every_stage
def test_a_step_after_an_overflow_needs_a_backward_too(stage):
    engine = make(stage, "fp16")
    backward(engine, torch.inf)
    engine.step()
    assert not engine.was_step_applied()
    with pytest.raises(UserError, match=NO_BACKWARD):
        engine.step()


@every_stage
def test_a_step_inside_accumulation_does_nothing(stage):
    engine = make(stage, micro_batches=3)
    before = masters(engine)
    for _ in range(2):
        engine.step()
    assert all(torch.equal(*pair) for pair in zip(before, masters(engine), strict=True))


def set_by_hand(engine, values):
    """Set gradients like a user; stage 3 needs the full parameter for it."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = None if value is None else value.to(parameter)


def some_gradients(engine):
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in engine.module.parameters()]
    return [torch.full(shape, 2.0**-place) for place, shape in enumerate(shapes)]


@every_stage_and_precision
@pytest.mark.parametrize("is_after_backward", [True, False])
def test_gradients_set_by_hand_are_applied(stage, precision, is_after_backward):
    engine, twin = make(stage, precision), make("0", precision)
    values = some_gradients(engine)
    for _ in range(2):
        if is_after_backward:
            backward(engine, 7.0)
        set_by_hand(engine, values)
        engine.step()
        for parameter, value in zip(twin.module.parameters(), values, strict=True):
            parameter.main_grad.copy_(value)
        twin.step()
    norm = sum(each.double().square().sum() for each in values).sqrt().item()
    assert engine.get_global_grad_norm() == pytest.approx(norm / (S if precision == "fp16" else 1), rel=1e-6)
    for one, two in zip(masters(engine), masters(twin), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


@every_stage
def test_a_gradient_set_by_hand_replaces_only_that_of_its_parameter(stage):
    engine, twin = make(stage), make(stage)
    for one in (engine, twin):
        backward(one)
    values = [None, torch.full((5,), 0.5), None, None]
    set_by_hand(engine, values)
    if stage == "0":  # None would mean that there is no gradient
        for parameter, value in zip(engine.module.parameters(), values, strict=True):
            parameter.grad = parameter.main_grad if value is None else parameter.grad
    safe_set_full_grad(list(twin.module.parameters())[1], values[1])
    for one in (engine, twin):
        one.step()
    assert engine.get_global_grad_norm() == pytest.approx(twin.get_global_grad_norm(), rel=1e-6)
    assert same(engine, twin)


@every_stage
def test_gradients_set_by_hand_are_cleared_as_well(stage):
    engine, twin = make(stage), make(stage)
    backward(engine, 5.0)
    set_by_hand(engine, some_gradients(engine))
    engine.optimizer.zero_grad()
    for one in (engine, twin):
        backward(one)
        one.step()
    assert same(engine, twin)


@every_stage
def test_a_gradient_of_another_shape_is_an_error_that_names_its_parameter(stage):
    engine = make(stage)
    backward(engine)
    set_by_hand(engine, some_gradients(engine))
    list(engine.module.parameters())[1].grad.data = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"0\.bias\.grad has shape \(3,\) on cpu, the parameter \(5,\)"):
        engine.step()


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_copy_of_the_module_clears_only_its_own_gradients(stage):
    engine = make(stage)
    copied = copy.deepcopy(engine.module)
    again = copy.deepcopy(copied)
    x = torch.ones(1, 6, dtype=torch.bfloat16)
    backward(engine)
    for one in (copied, again):
        one(x).float().sum().backward()
        one.zero_grad()
        assert all(parameter.grad is None for parameter in one.parameters())
    assert safe_get_full_grad(next(engine.module.parameters())).any()
    engine.step()
    assert engine.was_step_applied()


def test_a_part_of_a_model_of_stage_0_is_pickled_without_its_engine():
    engine = make("0")
    backward(engine)
    loaded = pickle.loads(pickle.dumps(engine.module[0].weight))
    assert torch.equal(loaded, engine.module[0].weight)
    engine.step()
    assert engine.was_step_applied()


@every_stage_and_precision
def test_gradients_of_two_backwards_before_a_step_add_up(stage, precision):
    engine, plain = make(stage, precision, clip=0.0), make("0", precision, clip=0.0)
    reference = copy.deepcopy(plain.module).double()
    for seed in (1, 2):
        backward(engine, seed=seed)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(DTYPES[precision])
        reference(x.double()).square().sum().backward()
    engine.step()
    squares = sum(each.grad.square().sum() for each in reference.parameters())
    assert engine.get_global_grad_norm() == pytest.approx(
        squares.sqrt().item(), rel=1e-5 if precision == "fp32" else 2e-2
    )


class TwoOutputs(torch.nn.Module):
    """A model that returns its loss and what the loss is computed from, as transformers' models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y.float().square().sum(), y


def engine_of_two_outputs(stage, precision, net=None):
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": int(stage[0])},
        "megalowbit": {"precision": precision},
    }  # fmt: skip
    if precision == "fp16":
        settings["megalowbit"]["grad_scaler"] = {"type": "constant", "scale": S}
    return initialize(model=net or TwoOutputs(), config=settings)[0]


def backward_through_detached_outputs(engine, _, y):
    """The loss is computed on copies of the outputs, as where gradients of many batches are cached."""
    copied = y.detach().requires_grad_()
    engine.scale(copied.float().square().sum()).backward()
    y.backward(copied.grad)


SCALED_BACKWARDS = (
    lambda engine, loss, _: engine.backward(loss),
    lambda engine, loss, _: engine.scale(loss).backward(),
    lambda engine, _, y: engine.scale(y.float().square().sum()).backward(),
    backward_through_detached_outputs,
)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", ["0", "1", pytest.param("2", marks=pytest.mark.slow), "3"])
def test_a_scaled_loss_is_divided_by_the_micro_batches_once(stage, precision):
    norms = []
    for backward_of in SCALED_BACKWARDS:
        engine = engine_of_two_outputs(stage, precision)
        for seed in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            backward_of(engine, *engine(x.to(DTYPES[precision])))
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    weight = TwoOutputs().double().layer
    for seed in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()
        (weight(x).square().sum() / 2).backward()
    exact = torch.cat([each.grad.flatten() for each in weight.parameters()]).norm().item()
    assert norms == pytest.approx([exact] * len(SCALED_BACKWARDS), rel=1e-6 if precision == "fp32" else 5e-3)


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_backward_that_would_divide_twice_is_refused_and_one_of_a_single_output_is_not(stage):
    engine = engine_of_two_outputs(stage, "fp32")
    with pytest.raises(
        UserError, match=r"output computed from another output would divide .* call engine.backward\(loss\)"
    ):
        engine(torch.ones(1, 6))[0].backward()
    engine, twin = engine_of_two_outputs(stage, "fp32"), engine_of_two_outputs(stage, "fp32")
    for _ in range(2):
        engine(torch.ones(1, 6))[1].square().sum().backward()
        twin.backward(twin(torch.ones(1, 6))[0])
        for each in (engine, twin):
            each.step()
    assert same(engine, twin)


CALLS = {
    "forward": lambda engine, x: engine.forward(x)[0],
    "module": lambda engine, x: engine.module(x)[0],
    "a part of the module": lambda engine, x: engine.module.layer(x).square().sum(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_scaled_loss_of_another_call_is_divided_once(call):
    engine, twin = engine_of_two_outputs("0", "fp32"), engine_of_two_outputs("0", "fp32")
    for _ in range(2):
        engine.scale(CALLS[call](engine, torch.ones(1, 6))).backward()
        twin.backward(twin(torch.ones(1, 6))[0])
        for each in (engine, twin):
            each.step()
    assert engine.get_global_grad_norm() == pytest.approx(twin.get_global_grad_norm(), rel=1e-6)


def squares(*outputs):
    return sum(each.float().square().sum() for each in outputs)


IN_PARALLEL = {
    "two forwards": lambda engine, x: squares(engine(x)[1], engine(2 * x)[1]),
    "two outputs of one operation": lambda engine, x: squares(*engine(x)[0]),
    "an output that is returned twice": lambda engine, x: squares(engine(x)[1]),
}


class ParallelOutputs(TwoOutputs):
    def forward(self, x):
        hidden = self.layer(x)
        again = hidden.tanh()
        return hidden.exp().unbind(-1), again, {"again": again}


@pytest.mark.parametrize(
    ("stage", "case"),  # from stage 1 on, DeepSpeed ends no direct backward of two forwards
    [(stage, case) for stage in ("0", "1") for case in IN_PARALLEL if (stage, case) != ("1", "two forwards")],
)
def test_a_backward_of_parallel_outputs_divides_each_once(stage, case):
    engine, twin = (engine_of_two_outputs(stage, "fp32", ParallelOutputs()) for _ in range(2))
    for seed in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        IN_PARALLEL[case](engine, x).backward()
        twin.backward(IN_PARALLEL[case](twin, x))
        for each in (engine, twin):
            each.step()
    assert engine.get_global_grad_norm() == pytest.approx(twin.get_global_grad_norm(), rel=1e-6)


def test_a_forward_of_an_output_of_the_model_is_divided_twice_and_refused():
    engine = engine_of_two_outputs("0", "fp32")
    first = engine(torch.ones(1, 6))[1]
    with pytest.raises(UserError, match="output computed from another output"):
        engine(torch.cat([first, first], -1))[1].sum().backward()
    engine(torch.ones(1, 6))[1].sum().backward()  # the refused backward is forgotten


@pytest.mark.parametrize("stage", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_sums_in_half_precision_are_refused(stage):
    engine = make(stage, "bf16")
    with pytest.raises(UserError, match=rf"coalesce_grad_reduction\(\) would add .* at ZeRO stage {stage}"):
        engine.coalesce_grad_reduction()
