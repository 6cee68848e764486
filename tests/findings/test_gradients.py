"""Skipped steps: those of a scale that is too large are healthy, all others have their place."""

import math

import pytest

from megalowbit.durable_files import MANIFEST, step_name
from megalowbit.findings import base
from megalowbit.findings.gradients import findings
from megalowbit.findings.run_files import read_run


def skip(records, first, last, *, scale=None, tensor="h.1.up.weight", **more):
    """Skip steps, with a scale that is halved each time unless it is given."""
    count = 0
    for row in records.rows:
        if first <= row["step"] <= last:
            count += 1
            row |= {
                "grad_norm": None,
                "skipped/tensor": tensor,
                "skipped/rank": 0,
                "skipped/ranks": 1,
                **more,
            }
            row["loss_scale"] = scale or max(1.0, 65536.0 / 2 ** (count - 1))
        row["skipped_steps"] = count


def scaled(records, scale=65536.0):
    for row in records.rows:
        row["loss_scale"] = scale


def test_a_healthy_run_and_a_search_for_the_scale_have_no_finding(records, tmp_path):
    assert not findings(records.read(tmp_path / "healthy"))
    scaled(records, 256.0)
    skip(records, 1, 9)  # from 2^16 down to 2^8
    assert not findings(records.read(tmp_path / "start"))


def test_single_overflows_after_the_scale_has_grown_are_healthy(records, tmp_path):
    scaled(records)
    skip(records, 20, 22, scale=None)
    assert not findings(records.read(tmp_path / "run"))


def test_a_scale_that_falls_far_below_what_had_worked_is_no_overflow(records, tmp_path):
    scaled(records)
    skip(records, 30, 60)
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step, found.is_shown) == (base.GRADIENTS, 30, True)
    assert "h.1.up.weight" in found.title
    assert "on rank" not in found.title  # there is one process
    text = "\n".join(map(str, found.evidence))
    assert "31 skipped steps in a row, to step 60" in text
    assert "65536 had worked before: the scale is not the cause" in text


def test_without_a_scale_one_skip_is_a_finding(records, tmp_path):
    skip(records, 12, 12, scale=1.0)
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.GRADIENTS, 12)


@pytest.mark.parametrize(("steps", "ranks", "names"), [(20, 1, True), (2, 1, False), (20, 2, False)])
def test_one_rank_is_named_only_if_it_alone_was_at_fault_often_enough(records, tmp_path, steps, ranks, names):
    records.attempts[0]["processes"] = 2
    skip(records, 20, 19 + steps, scale=1.0, **{"skipped/rank": 1, "skipped/ranks": ranks})
    (found,) = findings(records.read(tmp_path / "run"))
    assert ("on rank 1 only" in found.title) is names
    assert any("device of rank 1" in remedy for remedy in found.remedy) is names


def test_a_loss_that_is_not_finite_names_the_first_layer_with_such_an_input(records, tmp_path):
    skip(records, 25, 60, scale=1.0)
    for row in records.rows[24:]:
        row["loss"] = math.nan
    for step in (30, 40, 50, 60):
        for layer in ("h.2.up", "h.1.down", "h.1.up"):
            records.tables[step][layer, "input"]["nonfinite_quantizations"] = 3
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.LOSS, 25)
    assert any("is h.1.up: they arise before it" in str(each) for each in found.evidence)


@pytest.mark.parametrize(("saved", "expected"), [(None, False), (20, True), (40, False)])
def test_a_rollback_is_advised_only_if_a_checkpoint_from_before_is_there(records, tmp_path, saved, expected):
    skip(records, 25, 60, scale=1.0)
    folder = records.write(tmp_path / "run")
    if saved:
        checkpoint = folder / "checkpoints" / step_name(saved)
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).write_text("{}")
    (found,) = findings(read_run(folder))
    assert any("rollback" in each for each in found.remedy) is expected


def test_a_loss_that_is_not_finite_in_an_applied_step_has_no_known_cause(records, tmp_path):
    records.rows[9]["loss"] = math.inf
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step, found.role) == (base.LOSS, 10, "symptom")


@pytest.mark.parametrize("processes", ["8", [8], 10**400, -2, None, True])
def test_a_number_of_processes_that_is_none_is_not_known(records, tmp_path, processes):
    scaled(records)
    skip(records, 40, 60, **{"skipped/rank": 3})
    records.attempts[0]["processes"] = processes
    (found,) = findings(records.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.GRADIENTS, 40)
    assert "on rank" not in found.title
