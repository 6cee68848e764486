"""Files of a run folder that are no files: nothing waits for a writer, and each is named."""

import os
import signal

import pytest
from made_runs import write_checks, write_layers, write_run

from megalowbit.errors import UserError
from megalowbit.findings.run_files import read_run
from megalowbit.pretrain.run_folder.folder import LOCK, RECORDS
from megalowbit.records.files import CHECKS, CONFIG, DONE, LAYERS, METRICS, REPORT, SAVED, SUMMARY
from megalowbit.records.run import read_runs
from megalowbit.report.page import write_report

JSON_LINES = ("attempts.jsonl", "attempts-rank3.jsonl")
NAMES = sorted({CHECKS, CONFIG, DONE, LAYERS, LOCK, METRICS, REPORT, SAVED, SUMMARY, *RECORDS, *JSON_LINES})
READ_BY_BOTH = {DONE, LAYERS, SUMMARY, *JSON_LINES}


@pytest.fixture(autouse=True)
def alarm():
    """A read that waits fails instead."""

    def fail(number, frame):
        raise TimeoutError("the read waits for a writer")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_no_name_of_a_run_folder_blocks_or_breaks_report_and_diagnose(tmp_path, name, make):
    folder = write_run(tmp_path / "run", 20)
    write_layers(folder, steps=20, every=10, layers=1)
    write_checks(folder, steps=20, layers=1)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert (name in " ".join(read_run(folder).notes)) == (name in {CONFIG, METRICS, *READ_BY_BOTH})
    if name in (CONFIG, METRICS):
        with pytest.raises(UserError, match=name):
            write_report([folder], tmp_path / "out.html")
        return
    assert write_report([folder], tmp_path / "out.html").is_file()
    (run,) = read_runs([folder])
    assert any(name in note for note in run.notes) == (name in {CHECKS, *READ_BY_BOTH})
