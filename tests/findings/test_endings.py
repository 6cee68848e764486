"""How an attempt ended, from its lines."""

import pytest
from small_runs import begun, ended

from megalowbit.findings import base
from megalowbit.findings.endings import findings

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
    from megalowbit.findings.run_files import read_run

    (found,) = findings(read_run(run))
    assert (found.name, found.step, found.role) == (base.CHECKPOINT, 40, "cause")
