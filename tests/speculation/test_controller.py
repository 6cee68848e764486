"""When the controller runs a check, and what it measures, reports and counts."""

import json
from collections import Counter

import pytest
import torch
from controlled_training import (
    PLAIN,
    batch,
    converted,
    growing,
    measured_bulk_db,
    row,
    train,
)

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.speculation.precisions import PRODUCTS, recipe_with
from megalowbit.speculation.settings import SpeculationSettings


def test_checks_run_at_the_interval_and_decide_for_the_next_step():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    reports, used, _ = train(model, controller, range(25))
    assert [step for step, report in enumerate(reports) if report is not None] == [0, 10, 20]
    assert [report.step for report in reports if report is not None] == [0, 10, 20]
    assert set(used[0].values()) == {"bf16"}
    for step in range(1, 25):
        # the first layer's input needs no gradient
        assert used[step]["up", "grad_input"] == "bf16"
        rest = {value for key, value in used[step].items() if key != ("up", "grad_input")}
        assert rest == {"int8"}
    assert controller.step == 25


def test_a_report_has_a_row_for_each_product_that_ran_and_says_what_changes():
    model = converted()
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 1})
    reports, _, _ = train(model, controller, range(11))
    first, second = reports[0], reports[10]
    ran = [(layer, product) for layer in ("up", "down", "branch") for product in PRODUCTS]
    ran.remove(("up", "grad_input"))
    assert [(each.layer, each.product) for each in first.rows] == ran
    assert {(each.layer, each.product) for each in first.changes} == set(ran)
    assert all((each.before, each.after, each.reason) == ("bf16", "int8", "safe") for each in first.changes)
    assert all(each.predicted_db > 15 for each in first.changes)
    assert first.shares == {"int8": 0.0, "bf16": 1.0}
    assert second.shares == {"int8": 1.0, "bf16": 0.0}
    for each in first.rows:  # bf16: nothing predicted, nothing measured
        assert (each.predicted_db, each.measured_db, each.is_hit) == (None, None, None)
        assert each.left_ratio > 3
        assert each.right_ratio > 1  # weights are uniform
    assert (first.hits, first.misses) == (0, 0)
    for each in second.rows:
        assert each.precision == "int8"
        assert each.is_hit
    assert (second.hits, second.misses) == (len(ran), 0)
    assert second.changes == ()


def test_measured_snr_is_that_of_the_full_products():
    model = converted()
    settings = {**PLAIN, "verify_every": 1, "verify_size": 1024, "every": 1}
    controller = mlb.PrecisionController(model, settings)
    train(model, controller, range(1))
    weight = model.up.weight.detach().double().numpy().copy()
    reports, _, _ = train(model, controller, range(1, 2))
    x = batch(1).double().numpy()
    assert row(reports[0], "up", "output").measured_db == pytest.approx(measured_bulk_db(x, weight), abs=0.05)


def test_predictions_are_close_to_what_is_measured():
    model = converted()
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 1, "verify_size": 128})
    reports, _, _ = train(model, controller, range(31))
    found = [each for report in reports[10::10] for each in report.rows]
    assert len(found) == 3 * 8
    for each in found:
        assert each.predicted_db == pytest.approx(each.measured_db, abs=2), each


def test_checks_are_verified_at_the_interval():
    model = converted()
    settings = {**PLAIN, "threshold_db": 0, "every": 2, "verify_every": 3}
    controller = mlb.PrecisionController(model, settings)
    reports, _, _ = train(model, controller, range(20))
    checks = [report for report in reports if report is not None]
    assert not any(report.changes for report in checks[1:])
    verified = [bool(measured_layers(report)) for report in checks]
    # the first three, of which the very first is at bf16, then every third
    assert verified == [False, True, True, True, False, False, True, False, False, True]


def measured_layers(report):
    return {each.layer for each in report.rows if each.measured_db is not None}


def test_a_check_can_be_requested():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(3))
    controller.check_next()
    state = json.loads(json.dumps(controller.state_dict()))
    controller.detach()
    controller = mlb.PrecisionController(model, PLAIN)
    controller.load_state_dict(state)
    reports, _, _ = train(model, controller, range(3, 12))
    assert [step for step, report in enumerate(reports, 3) if report is not None] == [3, 10]
    controller.begin_step()
    controller.check_next()  # in a step: the next one, this one has begun without
    assert controller.end_step() is None
    controller.begin_step()
    controller.begin_step()  # anew
    model(batch(0)).square().mean().backward()
    assert controller.end_step().step == 13
    controller.begin_step()
    assert controller.end_step() is None


@pytest.mark.parametrize("asks", [True, False])
def test_totals_follow_a_late_switch_at_once_if_a_check_is_requested(asks):
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(4))
    mlb.switch_precision(model, "all")
    if asks:
        controller.check_next()
    train(model, controller, range(4, 20))
    # bf16 in step 0 and from step 4 on; without a request, the check at step 10 reports the switch anyway
    assert controller.totals().share_8bit == pytest.approx((3 if asks else 9) / 20)
    assert {controller.precision(layer, "output") for layer in controller.layers} == {"bf16"}


def test_a_candidate_is_measured_before_a_product_first_runs_at_it():
    """Weights of one sign behind a GELU: the signal is larger than that of independent operands.

    The same data at each check and whole products, so there is nothing else to learn.
    """

    def gaps(**changes):
        model = converted()
        model.down.weight.data.abs_()
        settings = {
            "candidates": ["int4", "bf16"], "threshold_db": 0, "hysteresis_db": 0, "every": 1, "lookahead": 0,
            "verify_every": 1, "verify_size": 1024, "estimator": {"sample": 1 << 20},
        }  # fmt: skip
        controller = mlb.PrecisionController(model, {**settings, **changes})
        reports, _, _ = train(model, controller, range(4), data=lambda step: batch(0), lr=0.0)
        rows = [row(report, "down", "output") for report in reports]
        assert [each.precision for each in rows] == ["bf16", "int4", "int4", "int4"]
        return [each.predicted_db - each.measured_db for each in rows[1:]]

    learning, stubborn = gaps(), gaps(use_alignment=False)
    assert abs(learning[0]) < 0.2  # its input came from a layer at bf16
    assert learning[1:] == pytest.approx([0, 0], abs=0.15)
    assert min(map(abs, stubborn)) > 0.5
    assert stubborn == pytest.approx([stubborn[0]] * 3)


def test_totals_count_each_product_of_each_step():
    model = converted()
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 2})
    reports, used, _ = train(model, controller, range(43), data=growing(0.3, 15))
    ran = [key for key in used[0] if key != ("up", "grad_input")]
    counts = Counter(step[key] for step in used for key in ran)
    totals = controller.totals()
    checks = [report for report in reports if report is not None]
    assert totals.shares == {name: counts[name] / (43 * len(ran)) for name in ("int8", "bf16")}
    assert totals.share_8bit == totals.shares["int8"]
    assert totals.changes == sum(len(report.changes) for report in checks) > len(ran)
    assert totals.hits == sum(report.hits for report in checks) > 0
    assert totals.misses == sum(report.misses for report in checks)


def test_only_the_first_micro_batch_and_the_first_use_are_sampled():
    def one_check(spoil):
        model = converted()
        controller = mlb.PrecisionController(model, PLAIN)
        controller.begin_step()
        for micro_batch in range(2):
            x = batch(micro_batch)
            x[0, 0] *= 1000 if spoil == "second batch" and micro_batch else 1
            y = model(x)
            if spoil == "second use":
                y = y + model.branch(1000 * x.detach())
            y.square().mean().backward()
        return controller.end_step()

    plain = one_check(None)
    for spoil in ("second batch", "second use"):
        found = one_check(spoil)
        inputs = ("up", "output"), ("down", "output"), ("branch", "output")
        assert [row(found, *key) for key in inputs] == [row(plain, *key) for key in inputs]


def test_evaluation_is_not_sampled_and_runs_at_the_chosen_precision():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(1))
    x = batch(7)
    controller.begin_step()
    model.eval()
    at_int8 = model(x)
    model.train()
    controller.detach()
    model.eval()
    assert not torch.equal(model(x), at_int8)  # now at the recipe's own FP8
    for layer in bit_layers(model).values():
        layer.recipe = recipe_with(layer.recipe, ["int8"] * 3)
    assert torch.equal(model(x), at_int8)


def test_a_restarted_step_discards_its_samples():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    controller.begin_step()
    model(batch(0) * torch.inf).sum().backward()
    model.zero_grad()
    controller.begin_step()
    model(batch(0)).square().mean().backward()
    report = controller.end_step()
    assert {each.after for each in report.changes} == {"int8"}
    assert controller.step == 1


def test_a_step_must_be_begun():
    controller = mlb.PrecisionController(converted(), SpeculationSettings())
    with pytest.raises(UserError, match="call begin_step"):
        controller.end_step()
    controller.begin_step()
    controller.end_step()
    with pytest.raises(UserError, match="call begin_step"):
        controller.end_step()


def test_a_verified_check_corrects_all_candidates():
    model = converted()
    settings = {**PLAIN, "candidates": ["int8", "fp8", "bf16"], "every": 1, "lookahead": 0, "verify_every": 2}
    controller = mlb.PrecisionController(model, settings)
    known = []
    for step in range(5):  # verified: 0, 1, 2 and 4
        train(model, controller, [step], lr=0.0)
        known.append(controller.state_dict()["layers"]["down"]["output"]["corrections"])
    assert all(value is not None for corrections in known for value in corrections)
    assert known[0] != known[1] != known[2] == known[3] != known[4]
