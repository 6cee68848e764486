"""What the course of the loss shows, and what it does not."""

import math
import random

import pytest

from megalowbit.findings import base
from megalowbit.findings.base import Finding
from megalowbit.findings.losses import findings
from megalowbit.findings.verdict import diagnosis_of


def test_a_healthy_run_and_a_short_one_have_no_finding(records, tmp_path):
    assert not findings(records.read(tmp_path / "healthy"), [])
    records.rows = records.rows[:5]
    assert not findings(records.read(tmp_path / "short"), [])


def diverge(records, first, factor=1.15):
    for row in records.rows[first - 1 :]:
        row["loss"] *= factor ** (row["step"] - first + 1)
        row["grad_norm"] *= 6


def test_a_rise_at_a_rate_that_replaces_the_weights_is_the_learning_rate(records, tmp_path):
    for row in records.rows:
        row["lr"] *= 30
    diverge(records, 30)
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.role, found.is_shown) == (base.RATE, "cause", True)
    assert found.step == 1  # where the rate became too high; the loss rose later
    assert "too high from step 1 on" in found.title
    assert "before step" not in found.remedy[0]  # there is no checkpoint before step 1
    assert "to 3" in found.title
    assert "--set optimizer.params.lr=0.002" in found.remedy[0]  # a tenth of the weights at the start


@pytest.mark.parametrize(("factor", "expected"), [(30, [(base.RATE, "cause", False)]), (10, [])])
def test_a_rate_that_replaces_the_weights_is_likely_too_high_without_a_rise(
    records, tmp_path, factor, expected
):
    for row in records.rows:
        row["lr"] *= factor
    found = findings(records.read(tmp_path / "run"), [])
    assert [(each.name, each.role, each.is_shown) for each in found] == expected
    assert all(each.remedy == ("--set optimizer.params.lr=0.002, in a new run",) for each in found)


def test_a_flat_loss_at_a_rate_that_replaces_the_weights_is_the_rate(records, tmp_path):
    for row in records.rows:
        row["loss"], row["lr"] = 5.5, 0.09
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.is_shown) == (base.RATE, False)
    records.config["megalowbit"]["model"] = {"checkpoint": "start"}  # with weights of another deviation
    assert not findings(records.read(tmp_path / "trained"), [])


def burst(records, rate, *, last=6):
    """A search for the loss scale, updates at a rate from step 6 on, and a loss that is NaN after them."""
    count = 0
    for row in records.rows:
        step = row["step"]
        row |= {"lr": rate, "loss_scale": 65536.0 if step > 5 else 2.0**20}
        if not 6 <= step <= last:
            count += 1
            row |= {"grad_norm": None, "skipped/tensor": "h.1.up.weight"}
        if step > last:
            row |= {"loss": math.nan, "loss_scale": max(1.0, 65536.0 / 2 ** (step - last))}
        row["skipped_steps"] = count


@pytest.mark.parametrize(("rate", "is_shown"), [(500.0, True), (0.1, False)])
def test_a_loss_that_is_nan_after_the_first_update_at_such_a_rate_is_the_learning_rate(
    records, tmp_path, rate, is_shown
):
    burst(records, rate)
    verdict = diagnosis_of(records.read(tmp_path / "run"))
    found = verdict.first
    assert (found.name, found.step, found.is_shown) == (base.RATE, 6, is_shown)
    assert "after 1 update at lr" in found.title
    assert "not finite from step 7 on" in found.title
    assert found.remedy == ("--set optimizer.params.lr=0.002, in a new run",)
    assert base.LOSS in {each.name for each in verdict.consequences}


@pytest.mark.parametrize("change", ["a usual rate", "SGD", "trained weights", "many updates"])
def test_a_loss_that_is_nan_after_other_updates_is_not_blamed_on_the_rate(records, tmp_path, change):
    burst(records, 1e-3 if change == "a usual rate" else 500.0, last=40 if change == "many updates" else 6)
    if change == "SGD":
        records.config["optimizer"] = {"type": "SGD"}
    if change == "trained weights":
        records.config["megalowbit"]["model"] = {"checkpoint": "start"}
    verdict = diagnosis_of(records.read(tmp_path / "run"))
    titles = [each.title for each in (verdict.first, *verdict.consequences, *verdict.others)]
    assert titles
    assert not any("after" in title and "at lr" in title for title in titles)


@pytest.mark.parametrize("row", [60, 90, 300])
def test_easy_batches_early_in_a_long_run_are_no_rise(records, tmp_path, row):
    draw = random.Random(3)
    usual = records.rows[9]
    records.rows = [
        {
            **usual,
            "step": step,
            "lr": 0.01,
            "loss": (2 + 3.5 * math.exp(-step / 12) + 1.2 / (1 + step / 300)) * draw.gauss(1, 0.01),
        }
        for step in range(1, 2001)
    ]
    for place in (row, row + 1):
        records.rows[place]["loss"] *= 0.75
    assert not findings(records.read(tmp_path / "run"), [])


def unlearn(records):
    """A loss that falls in four steps, rises and then falls for good, as it does at 100 times the rate."""
    for row, loss in zip(records.rows[:9], (5.5, 5.5, 4.2, 3.8, 5.0, 5.9, 5.1, 4.8, 4.6), strict=True):
        row["loss"] = loss


def test_a_loss_that_is_unlearned_within_a_few_steps_is_the_learning_rate(records, tmp_path):
    unlearn(records)
    assert not findings(records.read(tmp_path / "usual"), [])
    for row in records.rows:
        row["lr"] *= 100
    (found,) = findings(records.read(tmp_path / "large"), [])
    assert (found.name, found.step, found.is_shown) == (base.RATE, 1, True)
    assert "the loss rose from step 4 to 5, at lr 0.3" in found.title


def test_one_easy_batch_at_a_large_rate_is_no_rise(records, tmp_path):
    for row in records.rows:
        row["lr"] *= 10
    records.rows[24]["loss"] *= 0.75
    assert not findings(records.read(tmp_path / "run"), [])


@pytest.mark.parametrize("easy", [(30, 31), (30, 32)], ids=str)
def test_easy_batches_of_a_loss_that_had_settled_are_no_rise(records, tmp_path, easy):
    for row in records.rows:
        row["lr"] *= 10
    for step in easy:
        records.rows[step]["loss"] *= 0.75
    assert not findings(records.read(tmp_path / "run"), [])


def test_a_large_rate_of_sgd_is_compared_with_no_weights(records, tmp_path):
    unlearn(records)
    records.config["optimizer"] = {"type": "SGD", "params": {"lr": 0.3}}
    for row in records.rows:
        row["lr"] *= 100
    assert not findings(records.read(tmp_path / "unlearned"), [])
    diverge(records, 30, 1.03)
    (found,) = findings(records.read(tmp_path / "diverged"), [])
    assert (found.name, found.is_shown) == (base.RATE, False)
    assert not [each for each in found.evidence if "Adam" in each.text]
    assert "--set optimizer.params.lr=0.03" in found.remedy[0]  # a tenth; no weights limit it


def test_a_rise_at_a_moderate_rate_is_likely_the_rate_if_gradients_grew_too(records, tmp_path):
    diverge(records, 30, 1.03)
    (found,) = findings(records.read(tmp_path / "grew"), [])
    assert (found.name, found.is_shown) == (base.RATE, False)
    for row in records.rows:
        row["grad_norm"] = 1.0
    (found,) = findings(records.read(tmp_path / "constant"), [])
    assert (found.name, found.role) == (base.ROSE, "symptom")


def test_a_rise_after_the_rate_has_fallen_is_not_the_rate(records, tmp_path):
    for row in records.rows[20:]:
        row["lr"] = 1e-5
    diverge(records, 30)
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert found.role == "symptom"


def test_a_missing_warm_up_is_named_and_how_to_add_one(records, tmp_path):
    for row in records.rows:
        row["lr"] = 0.3
    for row in records.rows[1:]:
        row["loss"] += 6 * 0.8 ** row["step"] + 3
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert "there is no warm-up" in found.title
    assert "megalowbit.lr_schedule" in found.remedy[1]
    records.config["scheduler"] = {"type": "WarmupLR"}
    (found,) = findings(records.read(tmp_path / "scheduler"), [])
    assert "scheduler.params.warmup_num_steps=10" in found.remedy[1]


@pytest.mark.parametrize(("level", "word"), [(9.0, "rose"), (0.2, "fell")])
def test_a_jump_that_does_not_come_back_has_no_known_cause(records, tmp_path, level, word):
    for row in records.rows[39:]:
        row["loss"] = level
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.step, found.role) == (base.JUMPED, 40, "symptom")
    assert word in found.title


def test_a_jump_that_comes_back_in_one_step_is_likely_the_data(records, tmp_path):
    for row in records.rows[39:46]:
        row["loss"] = 9.0
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.step, found.is_shown) == (base.DATA, 40, False)
    assert "steps 40 to 46" in found.title


def test_an_unusual_update_before_the_jump_is_not_the_data(records, tmp_path):
    for row in records.rows[39:46]:
        row["loss"] = 9.0
    records.rows[38]["grad_norm"] = 80.0
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert found.role == "symptom"


def test_a_source_that_begins_with_the_jump_is_named(records, tmp_path):
    for row in records.rows:
        row |= {"loss/web": row["loss"], "loss/code": None}
    for row in records.rows[39:]:
        row |= {"loss": 9.0, "loss/web": None, "loss/code": 9.0}
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.step, found.is_shown) == (base.DATA, 40, True)
    assert "source code began to give samples, and the loss rose from" in found.title


def test_a_single_source_that_pauses_is_compared_with_none(records, tmp_path):
    for row in records.rows:
        row["loss/web"] = None if 20 < row["step"] <= 35 else row["loss"]
    assert findings(records.read(tmp_path / "run"), []) == []


def test_a_source_that_is_easier_or_that_was_there_before_is_told_apart(records, tmp_path):
    for row in records.rows:
        row |= {"loss/web": row["loss"], "loss/code": None if row["step"] < 40 else 0.8 * row["loss"]}
    (found,) = findings(records.read(tmp_path / "easier"), [])
    assert (found.name, found.step) == (base.DATA, 40)
    assert "fell" in found.title
    for row in records.rows:
        row["loss/code"] = 0.8 * row["loss"] if row["step"] % 7 == 0 else None
    assert not findings(records.read(tmp_path / "before"), [])


def test_a_change_that_an_earlier_cause_explains_is_a_symptom(records, tmp_path):
    diverge(records, 30, 1.03)
    known = [Finding(name=base.LAYER, step=28, title="", evidence=())]
    (found,) = findings(records.read(tmp_path / "run"), known)
    assert found.role == "symptom"


@pytest.mark.parametrize(("rate", "role"), [(1e-7, "cause"), (3e-3, "symptom")])
def test_a_loss_that_does_not_fall_is_the_rate_only_if_it_is_too_small(records, tmp_path, rate, role):
    for row in records.rows:
        row |= {"loss": 5.5 + 0.01 * math.sin(row["step"]), "lr": rate}
    (found,) = findings(records.read(tmp_path / "run"), [])
    assert (found.name, found.role) == (base.NO_LEARNING, role)


def test_an_isolated_spike_is_healthy(records, tmp_path):
    records.rows[44]["loss"] = 9.0
    assert not findings(records.read(tmp_path / "run"), [])
