"""Host reads of a step and their time, the order of its phases, and the handling of an overflow."""

import copy
import math

import pytest
import torch
from host_reads import HostReads

from megalowbit.optim.instruments import Instruments
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.inner_step import InnerStep
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings
from megalowbit.optim.timers import StepTimers


@pytest.fixture
def host(monkeypatch):
    """Reads of a step in their order; its update is the event "update"."""
    reads, run = HostReads(monkeypatch), InnerStep.run

    def noted(*arguments, **named):
        reads.events.append("update")
        return run(*arguments, **named)

    monkeypatch.setattr(InnerStep, "run", noted)
    return reads


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


INNER = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "plain": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
CONTEXTS = {
    "fp16": {"grad_scaler": lambda: DynamicGradScaler(256.0)},
    "bf16": {"grad_scaler": lambda: None, "bf16": True},
    "zeros": {"grad_scaler": lambda: ConstantGradScaler(256.0), "log_num_zeros_in_grad": True},
    "sum_of_norms": {"grad_scaler": lambda: DynamicGradScaler(256.0), "gradient_norm": "sum_of_norms"},
    "max_value": {"grad_scaler": lambda: MaxValueGradScaler(256.0)},
    "controller": {"grad_scaler": lambda: ControllerGradScaler(256.0)},
    "probe": {"grad_scaler": lambda: MaxNormGradScaler(256.0, probe_every=1)},
    "layers": {"grad_scaler": lambda: DynamicGradScaler(256.0), "layers": True},
}  # fmt: skip


def build(inner="fused AdamW", *, grad_scaler=None, layers=False, **options):
    model = Blocks().to(torch.bfloat16 if options.get("bf16") else torch.float16)
    scaler = grad_scaler() if grad_scaler else ConstantGradScaler(256.0)
    instruments = Instruments.attach(model, scaler, layer_scaling=LayerScalingSettings(enabled=layers))
    optimizer = Float16OptimizerWithFloat16Params(
        INNER[inner](model.parameters()), grad_scaler=scaler, instruments=instruments,
        **{"clip_grad": 0.1, "named_parameters": model.named_parameters(), **options},
    )  # fmt: skip
    return model, optimizer


def backward(model, optimizer):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(model.layers[0].weight.dtype)
    optimizer.scale_loss(model(x)).backward()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("inner", ["fused AdamW", "AdamW", "fused SGD"])
def test_an_applied_step_reads_once_and_after_its_update_was_launched(host, inner, context):
    has_kernels = cpu_kernels.is_available()  # the first call checks the kernels, which reads
    if inner == "AdamW" and not has_kernels:
        pytest.skip(cpu_kernels.why_unavailable())
    model, optimizer = build(inner, **CONTEXTS[context])
    for _ in range(3):  # state is made in the first step
        with host:
            backward(model, optimizer)
        assert host.events == []
        with host:
            report = optimizer.step()
        assert report.is_applied
        assert report.grad_norm > 0.1  # clipped
        assert host.events == ["update", "tolist"]


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_flag_is_read_before_the_step_of_an_optimizer_that_cannot_skip(host, context):
    model, optimizer = build("plain", **CONTEXTS[context])
    for _ in range(2):
        backward(model, optimizer)
        with host:
            assert optimizer.step().is_applied
        assert host.events == ["tolist", "update"]


def test_without_the_kernels_a_step_reads_once_too(host, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    for inner, events in (("fused AdamW", ["update", "tolist"]), ("AdamW", ["tolist", "update"])):
        model, optimizer = build(inner, **CONTEXTS["max_value"])
        backward(model, optimizer)
        with host:
            assert optimizer.step().is_applied
        assert host.events[:2] == events  # torch's AdamW then reads its own step counts


@pytest.mark.parametrize("inner", ["fused AdamW", "plain"])
def test_numbers_of_the_caller_are_read_with_those_of_the_step(host, inner):
    model, optimizer = build(inner, **CONTEXTS["max_value"])
    plain = build(inner, **CONTEXTS["max_value"])
    backward(model, optimizer)
    backward(*plain)
    numbers = torch.tensor([3.5, -1.0, 2.0**60], dtype=torch.float64)
    optimizer.also_read = lambda: numbers
    with host:
        report = optimizer.step()
    assert sorted(host.events) == ["tolist", "update"]
    assert report.also_read == (3.5, -1.0, 2.0**60)
    assert report == plain[1].step()
    assert plain[1].report.also_read == ()
    assert copy.copy(report).also_read == report.also_read
    backward(model, optimizer)
    model.layers[1].bias.main_grad[2] = math.inf
    assert optimizer.step().also_read == report.also_read  # of a skipped step too


def test_an_fp32_step_reads_once(host):
    model = Blocks()
    optimizer = FP32Optimizer(INNER["fused AdamW"](model.parameters()), clip_grad=0.1)
    backward(model, optimizer)
    with host:
        assert optimizer.step().is_applied
    assert host.events == ["update", "tolist"]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_costs_more_reads_and_launches_no_second_update(host, inner, bad):
    model, optimizer = build(inner)
    backward(model, optimizer)
    assert optimizer.step().is_applied
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer)
    model.layers[1].bias.main_grad[2] = bad
    with host:
        report = optimizer.step()
    assert report == (False, None, None)
    assert str(report) == "skipped at loss scale 2^8: overflow in layers.1.bias on rank 0"
    assert host.events.count("update") == (0 if inner == "plain" else 1)
    assert 1 < host.places.total() <= 4
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_huge_finite_gradient_is_applied_although_its_square_is_not_finite(inner, has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = FP32Optimizer(INNER[inner]([weight]), clip_grad=1.0)
    weight.main_grad.copy_(torch.tensor([3e30, 0.0, -4e30]))
    report = optimizer.step()
    assert report.is_applied
    assert report.grad_norm == pytest.approx(5e30, rel=1e-6)
    expected = torch.tensor([0.6, 0.0, -0.8])  # clipped to 1
    reference = torch.nn.Parameter(torch.zeros(3))
    reference.grad = expected
    INNER[inner]([reference]).step()
    torch.testing.assert_close(weight, reference)


def test_a_step_runs_its_phases_in_order_from_before_step_to_the_scaler():
    events = []

    class Scaler(ConstantGradScaler):
        def update(self, found_inf, statistics=None):
            events.append(("scaler", found_inf, statistics.loss_scale))
            return super().update(found_inf, statistics)

    class Inner(torch.optim.SGD):
        def step(self, closure=None):
            events.append(("inner", [p.grad.tolist() for p in self.param_groups[0]["params"]]))
            return super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Float16OptimizerWithFloat16Params(
        Inner([weight], lr=1.0), grad_scaler=Scaler(4.0), clip_grad=0.0, cast_parameters=True,
        before_step=lambda scale: events.append(("before", scale)),
    )  # fmt: skip
    for value in (8.0, math.inf):
        weight.main_grad.fill_(value)
        optimizer.step()
    assert events == [
        ("before", 4.0), ("inner", [[2.0, 2.0]]), ("scaler", False, 4.0),
        ("before", 4.0), ("scaler", True, 4.0),
    ]  # fmt: skip


def test_gradients_are_unscaled_with_the_scale_that_was_used_and_not_with_the_next():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([weight], lr=1.0, fused=True), clip_grad=0.0, cast_parameters=True,
        grad_scaler=DynamicGradScaler(2.0, growth_interval=1),
    )  # fmt: skip
    for step in range(1, 6):
        optimizer.scale_loss(weight.float().sum()).backward()
        report = optimizer.step()
        assert report.loss_scale == 2.0**step
        assert optimizer.loss_scale == 2.0 ** (step + 1)
        assert weight.tolist() == [-step, -step]


def test_the_phases_of_a_step_are_timed():
    model, optimizer = build(timers=StepTimers())
    backward(model, optimizer)
    optimizer.step()
    assert {"inspect", "update"} <= optimizer.timers.milliseconds().keys()
