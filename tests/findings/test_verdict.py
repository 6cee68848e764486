"""Order: the first cause, its consequences, what stands beside it, and what is not known."""

from pathlib import Path

import pytest
from small_runs import begun, ended

from megalowbit.findings import base
from megalowbit.findings.base import Finding
from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import HEALTHY, RUNNING, STOPPED, TROUBLED, _ordered, diagnosis_of


def finding(name, step, role="cause"):
    return Finding(name=name, step=step, role=role, title=name, evidence=())


@pytest.fixture
def run(records, tmp_path):
    return records.read(tmp_path / "run")


def test_a_healthy_run_is_healthy(run):
    verdict = diagnosis_of(run)
    assert (verdict.state, verdict.first, verdict.steps) == (HEALTHY, None, (60, 60))


def test_the_cause_with_the_lowest_step_is_first_and_others_follow_or_stand_beside(run):
    rose, layer = finding(base.ROSE, 30, "symptom"), finding(base.LAYER, 26)
    lost, early = finding(base.LOST_RANK, 40), finding(base.SLOW_RANK, 50)
    verdict = _ordered(run, [early, rose, lost, layer])
    assert verdict.first is layer
    assert verdict.consequences == (rose,)
    assert verdict.others == (lost, early)
    assert verdict.state == TROUBLED
    assert verdict.is_cause_known


def test_a_slow_rank_is_first_only_if_nothing_else_is_wrong_or_follows_from_it(run):
    slow, astray = finding(base.SLOW_RANK, 2), finding(base.REPLICAS, 30)
    verdict = _ordered(run, [slow, astray])
    assert (verdict.first, verdict.others) == (astray, (slow,))
    hang = finding(base.HANG, 40)
    verdict = _ordered(run, [hang, slow])
    assert (verdict.first, verdict.consequences) == (slow, (hang,))
    assert _ordered(run, [slow]).first is slow


def test_of_one_step_the_cause_comes_before_the_symptom(run):
    symptom, cause = finding(base.JUMPED, 30, "symptom"), finding(base.LAYER, 30)
    verdict = _ordered(run, [symptom, cause])
    assert verdict.first is cause
    assert verdict.consequences == (symptom,)


def test_a_symptom_before_every_cause_is_not_explained_by_a_later_one(run):
    symptom, cause = finding(base.ROSE, 10, "symptom"), finding(base.LOST_RANK, 50)
    verdict = _ordered(run, [cause, symptom])
    assert verdict.first is symptom
    assert not verdict.is_cause_known
    assert verdict.others == (cause,)


def test_a_run_that_trains_or_was_stopped_is_no_trouble(records, tmp_path):
    records.is_done = False
    records.attempts = [begun(step=0), ended("stopped", signal="SIGTERM", step=60)]
    verdict = diagnosis_of(records.read(tmp_path / "stopped"))
    assert verdict.state == STOPPED
    assert verdict.first.name == base.STOPPED
    import fcntl

    records.attempts = [begun(step=0)]
    folder = records.write(tmp_path / "running")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert diagnosis_of(read_run(folder)).state == RUNNING
    assert diagnosis_of(read_run(folder)).first.name == base.KILLED


def test_a_run_without_any_record_says_so(tmp_path):
    folder = Path(tmp_path / "run")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    verdict = diagnosis_of(read_run(folder))
    assert (verdict.state, verdict.first.name) == (TROUBLED, base.UNFINISHED)
    assert verdict.first.role == "symptom"


def test_a_finished_run_that_is_continued_and_killed_is_not_done(records, tmp_path):
    records.attempts = [begun(step=0), ended("finished", step=40), begun(step=40) | {"time": 9e9}]
    folder = records.write(tmp_path / "run")
    (folder / "DONE").write_text('{"step": 40}')
    assert diagnosis_of(read_run(folder)).first.name == base.KILLED
