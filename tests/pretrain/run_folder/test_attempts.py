"""Each attempt leaves a line at its start and one at its end, whatever ends it."""

import errno
import json
import os
import shutil
import signal
import threading

import pytest
from ended_runs import STEPS

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import TransientError, UserError
from megalowbit.pretrain import loop
from megalowbit.pretrain.run import pretrain
from megalowbit.pretrain.run_folder.attempts import AttemptRecord
from megalowbit.records.files import ATTEMPTS

FIRST, SECOND = ProcessIdentity(world_size=2), ProcessIdentity(rank=1, world_size=2)


def lines(folder, name=ATTEMPTS):
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def failed(folder, identity, error, reported=None):
    """Record an attempt that begins and ends by `error`; the watchdog may report another error first."""
    with attempt(folder, identity) as record:
        record.begin(is_resumed=False, facts={})
        if reported is not None:
            record.fail(reported)
        raise error


def attempt(folder, identity=FIRST):
    record = AttemptRecord(folder, identity)
    record.step = lambda: 7
    return record


def test_a_start_and_an_end_are_recorded_by_the_main_process_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for identity in (FIRST, SECOND):
        with attempt(tmp_path, identity) as record:
            record.begin(is_resumed=True, facts={})
    begun, ended = lines(tmp_path)
    assert (begun["event"], begun["step"], begun["is_resumed"], begun["processes"], begun["job"]) == (
        "begun", 7, True, 2, "4711"
    )  # fmt: skip
    assert (ended["event"], ended["how"], ended["rank"]) == ("ended", "finished", 0)
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPTS]


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (KeyError("x"), "error"),
        (UserError("a mistake"), "user error"),
        (TransientError("a rank was lost"), "transient error"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_error_is_recorded_on_the_rank_that_has_it_and_passed_on(tmp_path, error, how):
    for identity, name in ((FIRST, ATTEMPTS), (SECOND, "attempts-rank1.jsonl")):
        with pytest.raises(type(error)):
            failed(tmp_path, identity, error)
        found = lines(tmp_path, name)[-1]
        assert (found["how"], found["error"]) == (how, type(error).__name__)
    assert not isinstance(error, UserError) or error.run_folder == tmp_path


def test_an_error_of_all_ranks_or_of_another_is_recorded_by_the_main_process_only(tmp_path):
    for attribute in ("is_on_all_ranks", "is_reported"):
        error = UserError("a mistake")
        setattr(error, attribute, True)
        for identity in (FIRST, SECOND):
            record = attempt(tmp_path, identity)
            record.begin(is_resumed=False, facts={})
            record.fail(error)
    assert [line["event"] for line in lines(tmp_path)] == ["begun", "ended"] * 2
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPTS]


@pytest.mark.parametrize(("identity", "name"), [(FIRST, ATTEMPTS), (SECOND, "attempts-rank1.jsonl")])
def test_a_line_that_a_kill_has_torn_does_not_swallow_the_next_one(tmp_path, identity, name):
    (tmp_path / name).write_text('{"event": "begun", "ti')
    with pytest.raises(KeyError):
        failed(tmp_path, identity, KeyError("x"))
    torn, *whole = (tmp_path / name).read_text().splitlines()
    assert torn == '{"event": "begun", "ti'
    assert [json.loads(line)["event"] for line in whole] == ["begun", "ended"][-len(whole) :]
    assert len(whole) == (2 if identity.is_main else 1)


def test_nothing_is_recorded_before_the_records_of_the_run_are_open(tmp_path):
    with pytest.raises(UserError), attempt(tmp_path):
        raise UserError("refused")
    assert not list(tmp_path.iterdir())


def test_an_end_is_recorded_once_and_a_full_disk_hides_no_error(tmp_path, monkeypatch):
    with pytest.raises(KeyError):
        failed(tmp_path, FIRST, KeyError("later"), TransientError("the watchdog was first"))
    assert [line.get("how") for line in lines(tmp_path)] == [None, "transient error"]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = attempt(tmp_path)
    record.begin(is_resumed=False, facts={})
    monkeypatch.setattr("megalowbit.pretrain.run_folder.attempts.open_regular", full)
    record.fail(KeyError("first"))  # raises nothing in its place
    with pytest.raises(UserError, match=r"attempts\.jsonl cannot be written \(No space left on device\)"):
        attempt(tmp_path).begin(is_resumed=False, facts={})


def test_a_run_and_its_continuation_are_two_attempts(resolve, finished):
    assert [(line["event"], line["step"]) for line in lines(finished)] == [("begun", 0), ("ended", 4)]
    pretrain(resolve("megalowbit.run.steps=6"), ProcessIdentity(), run_dir=finished, is_resume=True)
    assert [(line["event"], line["step"]) for line in lines(finished)[2:]] == [("begun", 4), ("ended", 6)]


def test_a_run_that_is_stopped_says_by_which_signal(resolve, tmp_path, stop_signals):
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    ended = lines(tmp_path / "run")[-1]
    assert (ended["how"], ended["signal"], ended["step"]) == ("stopped", "SIGUSR1", 1)


def test_a_deleted_run_folder_is_noticed_after_the_next_step(resolve, tmp_path, monkeypatch, caplog):
    run, original = tmp_path / "run", loop.train_step

    def train_step(job):
        if job.step == 1:
            shutil.rmtree(run)
        return original(job)

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(
        UserError, match=r"was deleted or moved while the run wrote to it: the checkpoint of step 3"
    ):
        pretrain(resolve("megalowbit.run.steps=9"), ProcessIdentity(), run_dir=run, is_resume=False)
    assert "step 2: the run folder" in caplog.text
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()
    monkeypatch.undo()
    pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), run_dir=run, is_resume=True)
    assert (run / "DONE").exists()
