import pytest
import torch

from megalowbit.engine.overflow_retry import StepSnapshot, retry_step
from megalowbit.errors import UserError
from megalowbit.optim.gradients.report import StepReport
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.statistics.layer_scaling import LayerScaling, find_blocks


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # a new tensor each time
        return self.layer(self.dropout(self.norm(x))).square().mean()


def optimizer_of(model, scaler):
    """An optimizer of fp32 parameters that skips steps with non-finite gradients."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return Float16OptimizerWithFloat16Params(inner, grad_scaler=scaler, bf16=scaler is None, clip_grad=0.0)


def overflowing_step(scaler):
    """Return `run()` of a step that always overflows, and the list of the scales it ran at."""
    model = torch.nn.Linear(1, 1)
    optimizer, scales = optimizer_of(model, scaler), []

    def run():
        scales.append(1.0 if scaler is None else scaler.scale)
        optimizer.zero_grad()
        optimizer.scale_loss(model(torch.ones(1)).sum() * torch.inf).backward()
        return optimizer.step()

    return run, StepSnapshot(model), scales


def train(scale, *, max_retries, steps=5, limit=64.0):
    """Train with gradients that overflow if `scale` times them exceeds `limit`; return the state by step."""
    model = Model()
    scaler = DynamicGradScaler(initial_scale=scale, hysteresis=2, growth_interval=1000)
    optimizer = optimizer_of(model, scaler)
    torch.manual_seed(7)
    seen = []
    for step in range(steps):
        batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + i)) for i in (0, 1)]

        def run(batches=batches):
            optimizer.zero_grad()
            losses = [model(batch) for batch in batches]
            overflow = torch.inf if scaler.scale > limit else 1.0
            optimizer.scale_loss(sum(losses) * overflow).backward()
            return optimizer.step(), [loss.item() for loss in losses]

        (report, losses), retries = retry_step(
            run, StepSnapshot(model), scaler, max_retries, is_applied=lambda result: result[0].is_applied
        )
        seen.append((report.is_applied, retries, losses))
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return seen, tensors, scaler.scale, torch.rand(3).tolist()


def test_a_run_that_overflows_first_equals_one_that_began_at_the_right_scale():
    seen, tensors, scale, numbers = train(512.0, max_retries=5)
    expected, same_tensors, same_scale, same_numbers = train(64.0, max_retries=0)
    assert [step[:2] for step in seen] == [(True, 3), (True, 0), (True, 0), (True, 0), (True, 0)]
    assert [step[2] for step in seen] == [step[2] for step in expected]
    assert tensors == same_tensors
    assert (scale, numbers) == (same_scale, same_numbers)
    assert tensors["calls"] == 10


def test_without_retries_an_overflowed_step_is_skipped():
    seen, tensors, _, _ = train(512.0, max_retries=0)
    assert [step[0] for step in seen] == [False] * 4 + [True]
    assert tensors["calls"] == 10


def test_retries_stop_at_max_retries_and_at_the_minimum_scale():
    scaler = DynamicGradScaler(initial_scale=2.0**10, min_scale=2.0**7)
    run, snapshot, scales = overflowing_step(scaler)
    report, retries = retry_step(run, snapshot, scaler, 2)
    assert (report.is_applied, retries) == (False, 2)
    # one octave a retry: hysteresis does not delay the first, and the update does not back off again
    assert scales == [1024.0, 512.0, 256.0]
    scales.clear()
    assert retry_step(run, snapshot, scaler, 9)[1] == len(scales) - 1
    assert scales[-1] == 128.0
    assert len(scales) < 4


@pytest.mark.parametrize("scaler", [None, ConstantGradScaler(8.0)])
def test_a_scale_that_cannot_be_lowered_is_not_retried(scaler):
    run, snapshot, scales = overflowing_step(scaler)
    report, retries = retry_step(run, snapshot, scaler, 3)
    assert (report.is_applied, retries, len(scales)) == (False, 0, 1)


def test_lowering_a_layer_factor_leaves_the_loss_scale_unchanged():
    blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    scaling = LayerScaling(blocks, ["0", "1"])
    state = scaling.state_dict()
    state["blocks"]["1"]["octaves"] = 3
    scaling.load_state_dict(state)
    assert find_blocks(torch.nn.ModuleDict({"h": blocks})) == ["h.0", "h.1"]
    scaler = DynamicGradScaler(initial_scale=64.0)

    def run():
        is_applied = scaling.factors["1"] <= 2.0
        if not is_applied:
            scaling.update([1.0, 1.0, torch.inf, 1.0], found_inf=True, loss_scale=scaler.scale)
        return StepReport(is_applied=is_applied)

    snapshot = StepSnapshot(blocks)
    report, retries = retry_step(run, snapshot, scaler, 5, layer_scaling=scaling)
    assert (report.is_applied, retries, scaler.scale) == (True, 2, 64.0)


def test_the_callers_states_are_restored_before_each_retry():
    values = {"count": 1}

    def restore(saved):
        values["count"] = saved

    snapshot = StepSnapshot(Model(), also=[(lambda: values["count"], restore)])
    for _ in range(2):
        values["count"] += 5
        snapshot.restore()
        assert values == {"count": 1}


@pytest.mark.parametrize("number", [-1, 1.0, True])
def test_an_invalid_number_of_retries_is_rejected(number):
    with pytest.raises(UserError, match="max_retries"):
        retry_step(lambda: None, StepSnapshot(Model()), None, number)
