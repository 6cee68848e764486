"""How an attempt ended, from its lines."""

import socket
from types import SimpleNamespace

import pytest
from small_runs import begun, ended

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import FAULTS, TransientError
from megalowbit.findings import base
from megalowbit.findings.endings import OF_FAULTS, findings
from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import diagnosis_of as diagnosis
from megalowbit.pretrain.run_folder.attempts import AttemptRecord
from megalowbit.supervision.diagnosis import diagnose, diagnose_together
from megalowbit.supervision.heartbeat import StoreSilentError
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    FailureReport,
    Heartbeat,
    HeartbeatSnapshot,
    StoreAddress,
)

SILENT = "rank 5 (host n2) does not answer: silent since step 12 (killed, stopped, or cut off the network)"


@pytest.fixture
def ending(records, tmp_path):
    """The findings of a run whose attempts have these lines."""

    def ending(*attempts, steps=12):
        records.is_done = False
        records.attempts = list(attempts)
        records.rows = records.rows[:steps]
        return findings(records.read(tmp_path / "run"))

    return ending


@pytest.mark.parametrize(
    ("line", "name", "title"),
    [
        (ended("transient error", SILENT), base.LOST_RANK, "rank 5 (host n2) no longer answered"),
        (ended("transient error", "ranks 8-15, 24 (hosts n2, n4) do not answer: silent"), base.LOST_RANK,
         "ranks 8-15, 24 (hosts n2, n4) no longer answered"),
        (ended("transient error", "rank 1 (host n1) has hung since step 8, in loader.py:88"), base.HANG,
         "rank 1 (host n1) hung"),
        (ended("transient error", "all ranks answer and have waited in all_reduce"), base.NETWORK, "no data"),
        (ended("transient error", "rank 1 (host n1) failed in step 5: RuntimeError: CUDA out of memory"),
         base.MEMORY, "no memory left"),
        (ended("error", "CUDA out of memory. Tried to allocate", error="OutOfMemoryError"), base.MEMORY,
         "no memory left"),
        (ended("error", "'x'", error="KeyError"), base.DEFECT, "KeyError ended the run"),
        (ended("transient error", "rank 1 (host n1) failed in step 5: KeyError: 'x'"), base.DEFECT,
         "an exception ended"),
        (ended("user error", "checkpoint was not written: No space left on device"), base.DISK, "was full"),
        (ended("user error", "step 9: the loss of 3 steps in a row was not finite"), base.GUARD,
         "stopped itself"),
        (ended("transient error", "ended by SIGTERM without a checkpoint: no step has ended"), base.OVERDUE,
         "no step ended in time"),
        (ended("transient error", "nobody knows this line"), base.TRANSIENT, "a fault that may pass"),
        (ended("transient error", "nobody knows this line", fault=["lost"]), base.TRANSIENT, "may pass"),
        (ended("user error", "nobody knows this line"), base.REFUSED, "ended itself"),
    ],
)  # fmt: skip
def test_the_line_of_the_end_names_the_reason(ending, line, name, title):
    (found,) = ending(begun(processes=8, step=0), {**line, "step": 12})
    assert found.name == name
    assert title in found.title
    assert found.step == 12
    assert line["line"] in found.evidence[0].text
    assert found.remedy or name in (base.GUARD, base.REFUSED)


def heartbeat(count, place="all_reduce (a.py:1 f)", *, is_waiting=True, is_done=False):
    return Heartbeat(
        count=count,
        mark="step 7",
        seconds=20.0,
        place=place,
        is_waiting=is_waiting,
        is_done=is_done,
        host="n2",
    )


def diagnosis_of(*ranks):
    """Of ranks with a first and a second heartbeat each."""
    first, second = ({rank: pair[each] for rank, pair in enumerate(ranks)} for each in (0, 1))
    return diagnose(HeartbeatSnapshot(first, second, len(ranks)), observer=0)


def without_a_store(address, lost=None):
    """The diagnosis of a rank whose store does not answer."""

    def execute(request):
        raise StoreSilentError("no answer for 9 s")

    thread = SimpleNamespace(
        execute=execute, store=SimpleNamespace(address=address), lost=lost, has_lost_launcher=False
    )
    return diagnose_together(thread, lambda: heartbeat(1), rank=1)


def of_a_busy_main_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return without_a_store(StoreAddress("n1", "127.0.0.1", server.getsockname()[1], True))


def of_a_rank_whose_diagnosis_ended():
    """The diagnosis of rank 0, which waits in vain for that of rank 1."""
    answers = iter([False, 1])  # whether it may diagnose, and who does
    thread = SimpleNamespace(execute=lambda request: next(answers), interval=0.0, seconds_to_answer=0.0)
    return diagnose_together(thread, lambda: heartbeat(1), rank=0)


def of_a_failure(line):
    report = FailureReport(1, "n2", "step 7", line, DEFECT)
    store = SimpleNamespace(
        claim=lambda task: True, raise_alarm=lambda: None, heartbeats=dict, failure=lambda: report,
        publish_diagnosis=lambda published: None,
    )  # fmt: skip
    thread = SimpleNamespace(execute=lambda request: request(store), interval=0.0)
    return diagnose_together(thread, lambda: heartbeat(1), rank=0)


WAITS, LOADS = [(heartbeat(1), heartbeat(4))], [
    tuple(heartbeat(count, "loader.py:8 next", is_waiting=False) for count in (1, 4))
]  # fmt: skip
DONE = [(heartbeat(3, is_waiting=False, is_done=True),) * 2]
MOVES = [tuple(heartbeat(count, f"a.py:{count} f", is_waiting=False) for count in (1, 4))]
LAUNCHER = StoreAddress("n1", "127.0.0.1", 1, False)
MAIN = LAUNCHER._replace(is_main_process=True)


@pytest.mark.parametrize(
    ("diagnose_it", "name", "role", "title"),
    [
        (lambda: diagnosis_of(*WAITS, (heartbeat(1), heartbeat(1))), base.LOST_RANK, "cause",
         "rank 1 (host n2) no longer answered"),
        (lambda: diagnosis_of(*WAITS, *LOADS), base.HANG, "cause", "rank 1 (host n2) hung"),
        (lambda: diagnosis_of(*LOADS, *LOADS), base.HANG, "cause", "all ranks hung"),
        (lambda: diagnosis_of(*WAITS, *MOVES), base.HANG, "cause", "rank 1 (host n2) did not finish in time"),
        (lambda: diagnosis_of(*WAITS, *DONE), base.HANG, "symptom", "rank 1 (host n2) left training"),
        (lambda: diagnosis_of(*WAITS, *WAITS), base.NETWORK, "cause", "no data passed"),
        (lambda: diagnosis_of(*WAITS, (heartbeat(1, "b"), heartbeat(4, "b"))), base.HANG, "symptom",
         "no rank made progress"),
        (lambda: without_a_store(LAUNCHER), base.LOST_RANK, "cause", "the launcher's store (at n1:1) no"),
        (lambda: without_a_store(MAIN), base.LOST_RANK, "cause", "the main process (rank 0, at n1:1) no"),
        (of_a_busy_main_process, base.LOST_RANK, "cause", "the main process (rank 0, at n1:"),
        (lambda: without_a_store(None), base.LOST_RANK, "cause", "the store of the process group no longer"),
        (of_a_rank_whose_diagnosis_ended, base.LOST_RANK, "cause", "rank 1 no longer answered"),
        (lambda: of_a_failure("KeyError: 'x'"), base.DEFECT, "cause", "an exception on rank 1 (host n2)"),
        (lambda: of_a_failure("RuntimeError: CUDA out of memory"), base.MEMORY, "cause", "no memory left"),
    ],
)  # fmt: skip
def test_what_supervision_has_found_is_a_finding_whatever_its_words(
    records, tmp_path, diagnose_it, name, role, title
):
    diagnosis = diagnose_it()
    for line in (diagnosis.line, "other words"):
        if name == base.MEMORY and line != diagnosis.line:
            continue  # a library's words
        (found,) = findings(ended_by(records, tmp_path / line[:5], diagnosis._replace(line=line).error()))
        assert (found.name, found.role) == (name, role)
        assert title in found.title
        assert any("--resume auto" in each for each in found.remedy)


def ended_by(records, folder, error):
    """A run whose only attempt ended by an error."""
    records.is_done, records.attempts = False, []
    attempt = AttemptRecord(records.write(folder), ProcessIdentity())
    attempt.begin(is_resumed=False)
    attempt.fail(error)
    return read_run(folder)


@pytest.mark.parametrize("fault", ["launcher", None])  # versions before `fault` recorded only the line
def test_the_end_of_the_launcher_is_a_cause_of_its_own(records, tmp_path, fault):
    line = "the launcher has ended before its ranks: saved after step 8, continue with --resume auto"
    (found,) = findings(ended_by(records, tmp_path / "run", TransientError(line, fault=fault)))
    assert (found.name, found.role) == (base.LAUNCHER, "cause")
    assert found.title.startswith("the launcher ended while its ranks trained")
    assert "--resume auto" in found.remedy[0]


def test_every_fault_has_a_finding(records, tmp_path):
    assert set(OF_FAULTS) == set(FAULTS)
    (found,) = findings(ended_by(records, tmp_path / "run", TransientError("x", fault="of another version")))
    assert (found.name, found.role) == (base.TRANSIENT, "symptom")


def test_an_attempt_without_an_end_was_killed_and_by_what_is_not_known(ending):
    (found,) = ending(begun(job="4711", step=0))
    assert found.name == base.KILLED
    assert "by what is not known" in found.title
    assert found.step == 12
    assert "sacct -j 4711" in found.remedy[0]
    assert "on n1: dmesg" in found.remedy[1]


def test_a_stop_on_request_is_no_failure(ending):
    (found,) = ending(begun(step=0), ended("stopped", signal="SIGUSR1", step=12))
    assert (found.name, found.is_failure) == (base.STOPPED, False)
    assert "SIGUSR1" in found.title


def test_only_the_last_attempt_counts(ending, records, tmp_path):
    assert not findings(records.read(tmp_path / "done"))
    (found,) = ending(begun(step=0), ended("error", "x", error="KeyError"), begun(step=4, time=3.0))
    assert found.name == base.KILLED


def test_a_run_that_finished_in_an_attempt_without_a_record_has_no_ending_but_a_note(records, tmp_path):
    records.attempts = [begun(step=0), ended("interrupted", step=60)]
    verdict = diagnosis(records.read(tmp_path / "run"))
    assert (verdict.state, verdict.first) == ("healthy", None)
    (note,) = verdict.notes
    assert "did not finish (interrupted); DONE says that the run has finished since" in note
    (tmp_path / "run" / "DONE").unlink()
    verdict = diagnosis(read_run(tmp_path / "run"))
    assert (verdict.first.name, verdict.notes) == (base.INTERRUPTED, ())


def test_an_attempt_to_continue_a_finished_run_that_failed_early_is_reported(records, tmp_path):
    """Its records were not opened, so the configuration and `DONE` are those of the finished run."""
    again = begun(step=60) | {"time": 3.0}, ended("user error", "No space left on device", step=60)
    records.attempts += [again[0], again[1] | {"time": 4.0}]
    (found,) = findings(records.read(tmp_path / "run"))
    assert found.name == base.DISK


def test_without_attempts_the_reason_is_not_known(ending):
    (found,) = ending()
    assert (found.name, found.role) == (base.UNFINISHED, "symptom")
    assert "how is not known" in found.title


def test_another_ranks_line_counts_if_the_main_process_left_none(ending):
    lost = ended("transient error", "the main process (rank 0, at n1:29500) has ended", rank=1, step=12)
    (found,) = ending(begun(processes=2, step=0), lost)
    assert found.name == base.LOST_RANK
    assert "rank 0" in found.title


def test_a_damaged_checkpoint_is_found_in_a_run_that_has_finished(records, tmp_path):
    run = records.write(tmp_path / "run")
    (run / "checkpoints" / "step-00000040.damaged").mkdir(parents=True)
    (found,) = findings(read_run(run))
    assert (found.name, found.step, found.role) == (base.CHECKPOINT, 40, "cause")
