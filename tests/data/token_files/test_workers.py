"""The processes that tokenise: when they start, what they import, and what becomes of an error."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from megalowbit.data.token_files import workers
from megalowbit.data.token_files.workers import Batch, encode, encode_in_order
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError

TEXTS = [f"document {number} é " * (number % 13 + 1) for number in range(400)]


def batch(texts, first=0):
    return Batch(texts, [f"place {first + number}" for number in range(len(texts))])


BATCHES = [batch(TEXTS[start : start + 16], start) for start in range(0, 400, 16)]


def ids_of(texts, end="\0"):
    return np.frombuffer("".join(f"{text}{end}" for text in texts).encode(), np.uint8)


@pytest.mark.parametrize("has_end", [True, False])
def test_a_batch_is_its_documents_one_after_another(has_end):
    sizes, ids = encode(ByteTokenizer(), ["ab", "", "é"], has_end=has_end)
    assert sizes == ([3, 1, 3] if has_end else [2, 0, 2])
    assert ids.tolist() == [*(b"ab\0\0\xc3\xa9\0" if has_end else b"ab\xc3\xa9")]


def test_processes_start_by_themselves_when_a_corpus_is_large(monkeypatch):
    monkeypatch.setattr(workers, "CHARACTERS_BEFORE_START", 2000)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    started = []
    monkeypatch.setattr(workers, "_start", lambda start=workers._start: started.append(1) or start())
    small = list(encode_in_order(iter(BATCHES[:1]), ByteTokenizer(), None))
    assert not started
    large = list(encode_in_order(iter(BATCHES), ByteTokenizer(), None))
    assert len(started) == 2
    assert np.array_equal(np.concatenate([ids for _, ids in large]), ids_of(TEXTS))
    assert small[0].sizes == large[0].sizes == [len(text.encode()) + 1 for text in TEXTS[:16]]


def test_processes_that_tokenise_do_not_import_torch():
    code = (
        "import sys, megalowbit.data.token_files.workers, megalowbit.data.tokenize; "
        "heavy = {'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_processes_that_cannot_be_started_are_a_line_and_leave_none_behind(monkeypatch):
    started, popen = [], subprocess.Popen

    def second_fails(*arguments, **values):
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*arguments, **values))
        return started[0]

    monkeypatch.setattr(workers.subprocess, "Popen", second_fails)
    with pytest.raises(UserError, match=r"cannot be started \(Resource .*\): lower data\.workers"):
        list(encode_in_order(iter(BATCHES), ByteTokenizer(), 3))
    assert started[0].returncode is not None


class Fragile(ByteTokenizer):
    """Fails at one document, in the way that it is told."""

    def __init__(self, how, document="document 39 "):
        self.how, self.document = how, document

    def encode_batch(self, texts):
        if any(text.startswith(self.document) for text in texts):
            if self.how == "exception":
                raise ValueError("an error")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().encode_batch(texts)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"has ended with exit code 3 at place 39, which begins 'document 39 é [^']*': mend"),
        pytest.param(
            "SIGSEGV",
            r"has ended by signal SIGSEGV at place 39, which begins 'document 39 é [^']*': mend",
            marks=pytest.mark.slow,
        ),
        ("SIGKILL", r"has ended by signal SIGKILL at place 39, .*: if memory was short, lower data\.workers"),
    ],
)
def test_the_document_that_ends_a_process_is_named_and_memory_only_after_a_kill(how, said):
    with pytest.raises(UserError, match=said) as caught:
        list(encode_in_order(iter(BATCHES), Fragile(how), 2))
    assert ("memory" in str(caught.value)) == (how == "SIGKILL")


@pytest.mark.parametrize("count", [1, 2])
def test_the_document_at_which_the_tokenizer_fails_is_named(count):
    found = []
    with pytest.raises(RuntimeError, match=r"has failed at place 39: an error"):
        found.extend(encode_in_order(iter(BATCHES), Fragile("exception"), count))
    assert len(found) == 2  # the batches before it


def test_after_a_crash_no_batch_waits_for_a_process_that_has_ended():
    all_fail = [batch(TEXTS[start : start + 4], start) for start in range(0, 400, 4)]
    with pytest.raises(UserError, match=r"exit code 3 at place 0, "):
        list(encode_in_order(iter(all_fail), Fragile("exit", "document"), 2))


def test_an_error_of_the_tokenizer_comes_from_its_process():
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = "no id"
    with pytest.raises(RuntimeError, match=r"a process that tokenises has failed:\n(.|\n)*ValueError"):
        list(encode_in_order(iter([batch(["a"]), batch(["b"])]), tokenizer, 2))


class Sleeps(ByteTokenizer):
    """Notes in a folder when it begins to sleep and when it wakes up; two documents end it at once."""

    def __init__(self, folder):
        self.folder = folder

    def encode_batch(self, texts):
        if "crash" in texts and len(texts) > 1:
            os._exit(3)
        if "sleep" in texts:
            (self.folder / f"asleep {os.getpid()}").touch()
            time.sleep(10)  # only a test that fails waits for this
            (self.folder / f"awake {os.getpid()}").touch()
        return super().encode_batch(texts)


def wait_for(is_true):
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def started(monkeypatch):
    """The processes."""
    found, start = [], workers._start
    monkeypatch.setattr(workers, "_start", lambda: found.append(start()) or found[-1])
    return found


def sleeping(folder):
    return len(list(folder.glob("asleep *")))


@pytest.mark.parametrize(
    "error",
    [None, UserError("line 5 is damaged"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.slow)],
)
def test_processes_that_work_are_ended_and_no_others_start(started, tmp_path, error):
    """Also: nothing waits for their answers, which come when they wake up."""

    def batches():
        yield batch(["a"])
        yield from [batch(["sleep"])] * 2
        wait_for(lambda: sleeping(tmp_path) == 2)
        if error:
            raise error
        yield batch(["b"])

    encoded = encode_in_order(batches(), Sleeps(tmp_path), 2)
    if error:
        with pytest.raises(type(error)):
            next(encoded)
    else:
        assert next(encoded).ids.tolist() == [ord("a"), 0]
        encoded.close()
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert not list(tmp_path.glob("awake *"))


@pytest.mark.parametrize("is_started", [True, False])
def test_the_search_for_a_document_that_crashes_ends_with_the_pool(
    started, monkeypatch, tmp_path, is_started
):
    begun, start = threading.Event(), workers._start

    def slow_start():
        if len(started) == 2:  # of the search
            begun.set()
            time.sleep(0 if is_started else 1)
        return start()

    monkeypatch.setattr(workers, "_start", slow_start)

    def batches():
        yield batch(["a"])
        yield batch(["sleep", "crash"])
        wait_for(lambda: sleeping(tmp_path) if is_started else begun.is_set())
        raise UserError("line 5 is damaged")

    with pytest.raises(UserError, match="line 5 is damaged"):
        list(encode_in_order(batches(), Sleeps(tmp_path), 2))
    assert len(started) == 3
    assert all(process.returncode is not None for process in started)
    assert not list(tmp_path.glob("awake *"))
