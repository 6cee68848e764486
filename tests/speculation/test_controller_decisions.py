"""What the controller decides on real layers: outliers that grow or jump, misses, layers that stay away."""

import math

import pytest
import torch
from controlled_training import (
    PLAIN,
    WIDE,
    batch,
    converted,
    growing,
    measured_bulk_db,
    row,
    train,
)
from torch import nn

import megalowbit as mlb

QUICK_GROWTH = [(0.05, 30), (0.1, 34), (0.2, 37)]


@pytest.mark.parametrize(
    ("rate", "start"),
    [
        pytest.param(rate, start, marks=() if (rate, start) in QUICK_GROWTH else pytest.mark.slow)
        for rate in (0.02, 0.05, 0.1, 0.15, 0.2)
        for start in (30, 34, 37)
    ],
)
def test_with_growing_outliers_a_precision_is_left_before_its_snr_misses_the_threshold(rate, start):
    """From 39 dB, 15 needed: at these rates a check finds up to 16 dB less than the previous one."""
    steps, model = range(round(45 + 2.9 / math.log10(1 + rate) / 2)), converted()
    controller = mlb.PrecisionController(model, PLAIN)
    data, seen = growing(rate, start), []

    def watched(step):
        x = data(step)
        measured = measured_bulk_db(x.double().numpy(), model.up.weight.detach().double().numpy())
        seen.append((controller.precision("up", "output"), measured))
        return x

    train(model, controller, steps, data=watched)
    assert min(measured for _, measured in seen) < 15 - 3  # it did fall, far
    assert all(measured > 15 for precision, measured in seen if precision == "int8")
    assert [precision for precision, _ in seen[1 : start + 10]] == ["int8"] * (start + 9)
    assert seen[-1][0] == "bf16"
    assert controller.totals().misses == 0


@pytest.mark.parametrize("rate", [pytest.param(0.25, marks=pytest.mark.slow), 0.3])
def test_growth_too_fast_for_a_trend_is_caught_at_the_next_check(rate):
    for start in (31, 35, 39):
        model = converted()
        controller = mlb.PrecisionController(model, PLAIN)
        data, below = growing(rate, start), []

        def watched(step, model=model, controller=controller, data=data, below=below):
            x = data(step)
            measured = measured_bulk_db(x.double().numpy(), model.up.weight.detach().double().numpy())
            if measured < 15 and controller.precision("up", "output") == "int8":
                below.append(step)
            return x

        train(model, controller, range(75), data=watched)
        assert len(below) <= 3  # steps of the ten between two checks
        assert controller.precision("up", "output") == "bf16"


def test_after_a_sudden_jump_the_next_check_changes_the_precision():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)

    def data(step):
        x = batch(step)
        x[:, 3] *= 100 if step >= 33 else 1
        return x

    reports, used, _ = train(model, controller, range(45), data=data)
    assert [step["up", "output"] for step in used[1:]] == ["int8"] * 40 + ["bf16"] * 4
    (change,) = [each for each in reports[40].changes if (each.layer, each.product) == ("up", "output")]
    assert (change.before, change.after, change.reason) == ("int8", "bf16", "predicted")
    assert row(reports[40], "up", "output").predicted_db < 15


def cancelling(model, steps):
    """Ordinary batches, except in `steps`: there the first layer's weight maps them to almost nothing."""
    weight = model.up.weight.detach().clone()
    space = torch.linalg.qr(weight.t())[0]  # (inputs, outputs), fewer outputs than inputs

    def data(step):
        x = batch(step)
        return x - 0.99 * (x @ space) @ space.t() if step in steps else x

    return data


class Narrow(nn.Module):
    """A layer with fewer outputs than inputs, so that inputs can cancel, and another one behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDE, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x))


def test_a_product_that_statistics_mispredict_is_missed_rolled_back_and_retried():
    """Inputs cancel in the product: its signal is 40 dB down, its operands are as before."""
    model = Narrow()
    mlb.convert(model, "fp8")
    settings = {**PLAIN, "verify_every": 2, "cooldown": 30, "use_alignment": False}
    controller = mlb.PrecisionController(model, settings)
    data = cancelling(model, range(33, 50))
    reports, used, _ = train(model, controller, range(90), data=data, lr=0.0)
    at_40 = row(reports[40], "up", "output")
    assert at_40.predicted_db > 25
    assert at_40.measured_db < 10
    assert at_40.is_hit is False
    assert (reports[40].misses, reports[40].hits) == (1, len(reports[40].rows) - 1)
    (change,) = reports[40].changes
    assert (change.layer, change.product, change.after, change.reason) == ("up", "output", "bf16", "missed")
    precisions = [step["up", "output"] for step in used]
    assert precisions == ["bf16"] + ["int8"] * 40 + ["bf16"] * 30 + ["int8"] * 19
    totals = controller.totals()
    assert (totals.misses, totals.rollbacks) == (1, 1)
    assert totals.hit_rate == totals.hits / (totals.hits + 1)


def test_alignment_learns_what_statistics_do_not_show():
    """The same inputs from the start: their alignment is measured before the first decision."""
    model = Narrow()
    mlb.convert(model, "fp8")
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 2})
    reports, used, _ = train(model, controller, range(41), data=cancelling(model, range(41)), lr=0.0)
    assert {step["up", "output"] for step in used} == {"bf16"}
    assert {step["down", "grad_weight"] for step in used[1:]} == {"int8"}
    assert controller.totals().misses == 0
    assert row(reports[40], "up", "output").reason == "predicted"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_operands_run_unquantised_until_later_checks(bad):
    model = converted()
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 1})

    def data(step):
        x = batch(step)
        x[2, 3] = bad if step == 20 else 0.0
        return x

    train(model, controller, range(20), data=data)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    reports, used, _ = train(model, controller, range(20, 21), data=data)
    model.load_state_dict(weights)  # as if the step had been skipped
    report = reports[0]
    assert used[0]["up", "output"] == "int8"
    assert {each.after for each in report.changes} == {"bf16"}
    assert {each.reason for each in report.changes} == {"not finite"}
    assert row(report, "up", "output").predicted_db is None
    assert row(report, "up", "output").measured_db is None
    assert (report.hits, report.misses) == (0, 0)
    _, used, _ = train(model, controller, range(21, 45), data=data)
    assert used[0]["up", "output"] == "bf16"
    assert used[-1]["up", "output"] == "int8"


def test_a_layer_that_does_not_run_keeps_its_precision():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(1))
    before = controller.state_dict()["layers"]["branch"]
    assert before["output"]["precision"] == "int8"
    reports, _, _ = train(model, controller, range(1, 21), takes_branch=False)
    assert controller.state_dict()["layers"]["branch"] == before
    assert {each.layer for each in reports[19].rows} == {"up", "down"}
    assert controller.precision("branch", "output") == "int8"


def test_a_late_switch_is_noticed_at_the_next_check():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(10))
    mlb.switch_precision(model, "forward")
    reports, used, _ = train(model, controller, range(10, 21))
    for report in (reports[0], reports[10]):
        for each in report.rows:
            assert each.precision == ("bf16" if each.product == "output" else "int8"), each
    assert row(reports[10], "up", "output").reason == "unquantised"
    assert {each for step in used[1:] for key, each in step.items() if key[1] == "output"} == {"bf16"}
    x = batch(0)
    plain = nn.functional.linear(x, model.up.weight, model.up.bias)
    torch.testing.assert_close(model.up(x), plain)


def test_each_candidate_has_a_separate_threshold():
    model = converted()
    settings = {"candidates": ["int4", "int8", "fp8", "bf16"], "every": 1, "lookahead": 0}
    thresholds = {"int4": 20.0, "int8": 50.0, "fp8": 15.0}
    controller = mlb.PrecisionController(model, {**settings, "threshold_db": thresholds})
    train(model, controller, range(2))
    found = {controller.precision(layer, "output") for layer in controller.layers}
    assert found == {"fp8"}
