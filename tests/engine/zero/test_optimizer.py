import pytest
import torch
from tiny_models import tiny_model

from megalowbit.engine.initialize import initialize
from megalowbit.engine.zero.optimizer import PhaseTimers, replace_optimizer_class
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.timers import StepTimers


def start(stage, **block):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "fp16", "grad_scaler": {"initial_scale": 16.0}, **block},
    }
    torch.manual_seed(0)
    return initialize(model=torch.nn.Linear(3, 2), config=config)[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 3).half()).float().sum())
    return engine.step()


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_optimizer_has_the_same_attributes_as_at_stage_0(stage):
    engine, of_stage_0 = start(stage), start(0)
    for one in (engine, of_stage_0):
        assert one.optimizer.report is None
        assert one.optimizer.grad_norm is None
        step(one)
    found, expected = engine.optimizer, of_stage_0.optimizer
    for name in ("report", "loss_scale", "found_inf", "overflow", "layer_scaling", "log_num_zeros_in_grad"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.report.loss_scale == 16.0
    assert found.grad_scaler.state_dict() == expected.grad_scaler.state_dict()
    assert engine.get_global_grad_norm() == pytest.approx(of_stage_0.get_global_grad_norm(), rel=1e-12)
    assert [group["lr"] for group in found.param_groups] == [group["lr"] for group in expected.param_groups]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_runs_its_phases_in_the_same_order_at_every_stage(stage, monkeypatch):
    engine, calls = start(stage), []

    def noted(name, method):
        return lambda *arguments, **named: calls.append(name) or method(*arguments, **named)

    for name in ("begin_step", "measure", "update", "locate", "end_step"):
        monkeypatch.setattr(engine.optimizer, name, noted(name, getattr(engine.optimizer, name)))
    step(engine)
    assert calls == ["begin_step", "measure", "update", "end_step"]
    calls.clear()
    hook = engine.module.weight.register_hook(lambda gradient: gradient * float("nan"))
    step(engine)
    hook.remove()
    late = (
        ["update"] if stage == 0 else []
    )  # launched before the host reads the flag; the update itself skips
    assert calls == ["begin_step", "measure", *late, "measure", "locate", "end_step"]
    assert not engine.optimizer.report.is_applied


@pytest.mark.parametrize("stage", [1, 3])
def test_phase_timers_and_deepspeeds_timers_work_together(stage):
    engine = start(stage)
    assert engine.optimizer.timers.milliseconds() == {}
    engine.optimizer.timers = StepTimers()
    step(engine)
    assert list(engine.optimizer.timers.milliseconds()) == ["inspect"]


def test_a_phase_timer_forwards_calls_to_deepspeeds_timer():
    class Theirs:
        def __call__(self, name):
            return f"timer {name}"

        def log(self, names):
            return f"log {names}"

    timers = PhaseTimers(Theirs())
    assert (timers("step"), timers.log(["a"])) == ("timer step", "log ['a']")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_huge_finite_gradient_is_measured_again_and_applied(stage, monkeypatch):
    monkeypatch.setattr(
        cpu_kernels, "is_available", lambda: False
    )  # its squares are computed exactly in the first pass
    engine = start(stage, precision="fp32", grad_scaler=None)
    engine.backward(engine(torch.ones(1, 3)).sum() * 1e30)
    report = engine.step() or engine.optimizer.report
    assert report.is_applied
    assert report.grad_norm == pytest.approx(8**0.5 * 1e30, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_closures_and_later_parameters_are_rejected(stage):
    optimizer = start(stage).optimizer
    with pytest.raises(TypeError, match="step takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UserError, match="parameters cannot be added later"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_without_the_scale_is_an_error_with_a_constant_scale_too(stage):
    engine = start(stage, grad_scaler={"type": "constant", "scale": 8.0})
    assert engine.optimizer.needs_scaler()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(torch.ones(1, 3).half()).float().sum().backward()


def hooks_on(engine):
    """How many hooks other code has on the gradients of the weights."""
    return sum(
        len(hooks or ())
        for weight in engine.module.parameters()
        for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_no_hook_of_an_instrument_outlives_the_engine(stage):
    bare, engine = (start(stage, grad_scaler={"type": kind}) for kind in ("dynamic", "max_value"))
    assert hooks_on(engine) > hooks_on(bare)
    for each in (bare, engine):
        each.destroy()
    assert hooks_on(engine) == hooks_on(bare)


def test_an_optimizer_of_another_kind_is_rejected():
    with pytest.raises(UserError, match="selects DeepSpeed's SGD, which is not supported"):
        replace_optimizer_class(torch.optim.SGD([torch.zeros(1)]))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_step_without_a_backward_is_rejected_and_the_run_can_continue(stage):
    engine = start(stage)
    with pytest.raises(UserError, match=r"^engine.step\(\) before any backward: call engine.backward"):
        engine.step()
    step(engine)
    assert engine.optimizer.report.is_applied
    with pytest.raises(UserError, match="before any backward"):
        engine.step()


def test_siblings_share_their_input_although_stage_3_gives_each_its_own_tensor(monkeypatch):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3},
        "megalowbit": {"precision": "bf16", "recipe": "nvfp4"},
    }
    engine = initialize(model=tiny_model("llama", num_layers=1), config=config)[0]
    given, made, quantized = [], [], MatmulContext._quantized
    for layer in bit_layers(engine.module).values():
        layer.register_forward_pre_hook(lambda layer, args: given.append(args[0]))

    def recording(self, operand, quantization, *args, **kwargs):
        made.append(quantization.role)
        return quantized(self, operand, quantization, *args, **kwargs)

    monkeypatch.setattr(MatmulContext, "_quantized", recording)
    tokens = torch.ones(2, 8, dtype=torch.long)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    assert len({id(each) for each in given}) == 7
    assert made.count("input") == 4
    engine.destroy()
