"""Tokenises batches of documents in several processes, and gives the ids back in order.

Each process is a new interpreter that reads batches from its stdin and writes ids to its stdout. It imports
the tokenizer's modules and not torch. It ends when its stdin is closed, so none outlives a killed parent.
Forked processes would be cheaper, but would inherit the locks and threads of the training process.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megalowbit.errors import UserError

MOST_BY_DEFAULT = 16  # processes; one reader does not feed many more
# Before they have tokenised this much, new processes would still be starting.
CHARACTERS_BEFORE_START = 32 * 2**20
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megalowbit.data.token_files.workers import serve; serve()"
)
# What writing to a process that has ended raises, or reading from it.
ENDED = (OSError, EOFError, pickle.UnpicklingError)
# Each process has one thread; the libraries would otherwise start one for every CPU.
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Encoder(Protocol):
    """What is needed of a tokenizer (`megalowbit.data.tokenize.Tokenizer`)."""

    name: str
    vocab_size: int
    eos_token_id: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids."""

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        """The ids of each text."""


class Batch(NamedTuple):
    """Documents to tokenise.

    Attributes:
        texts: of the documents.
        places: where each of them is, for messages.
    """

    texts: list[str]
    places: list[str]


class Encoded(NamedTuple):
    """The documents of a batch.

    Attributes:
        sizes: number of tokens of each document.
        ids: (tokens,), the documents one after another.
    """

    sizes: list[int]
    ids: NDArray[Any]


def encode(tokenizer: Encoder, texts: list[str], *, has_end: bool = True) -> Encoded:
    """Tokenise a batch in this process; `has_end`: append the end-of-document id to each document."""
    documents = tokenizer.encode_batch(texts)
    end = [np.array([tokenizer.eos_token_id], tokenizer.dtype)] if has_end else []
    sizes = [len(ids) + has_end for ids in documents]
    return Encoded(sizes, np.concatenate([piece for ids in documents for piece in (ids, *end)]))


def encode_in_order(
    batches: Iterator[Batch], tokenizer: Encoder, workers: int | None, *, has_end: bool = True
) -> Iterator[Encoded]:
    """Tokenise batches, and yield them in their order.

    Args:
        batches: documents.
        tokenizer: must be picklable if there are several processes.
        workers: number of processes; 1: this one; None: this one for the first 32 Mi characters, and then as
            many as there are CPUs, at most 16.
        has_end: append the end-of-document id to each document.

    Raises:
        UserError: a process has ended; the message names the document that ends it, or those that it had.
        RuntimeError: the tokenizer has failed; the message names the document.
    """
    count = workers or min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0)))
    if workers is None or count == 1:
        num_characters = 0
        for batch in batches:
            yield _encode_named(tokenizer, batch, has_end=has_end)
            num_characters += sum(map(len, batch.texts))
            if count > 1 and num_characters >= CHARACTERS_BEFORE_START:
                break
    if count > 1:
        yield from _in_processes(batches, tokenizer, count, has_end=has_end)


def _encode_named(tokenizer: Encoder, batch: Batch, *, has_end: bool) -> Encoded:
    """`encode`; if it fails, the documents are tried one by one, and the error names the first that fails."""
    try:
        return encode(tokenizer, batch.texts, has_end=has_end)
    except Exception:
        for text, place in zip(*batch, strict=True):
            try:
                encode(tokenizer, [text], has_end=has_end)
            except UserError as error:
                raise type(error)(f"{place}: {error}") from error
            except Exception as error:
                raise RuntimeError(f"tokenizer {tokenizer.name} has failed at {place}: {error}") from error
        raise


def _in_processes(
    batches: Iterator[Batch], tokenizer: Encoder, count: int, *, has_end: bool
) -> Iterator[Encoded]:
    first = next(batches, None)
    if first is None:
        return
    with _Workers(tokenizer, count, has_end=has_end) as workers:
        pending: deque[Future[Encoded]] = deque([workers.submit(first)])
        for batch in batches:
            pending.append(workers.submit(batch))
            if len(pending) >= 2 * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Workers:
    """The processes, and a thread for each that waits for its answers."""

    def __init__(self, tokenizer: Encoder, count: int, *, has_end: bool) -> None:
        self._start_message = pickle.dumps((tokenizer, has_end))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ending, self._start_or_end = False, threading.Lock()
        try:
            for _ in range(count):
                self._processes.append(_start())
        except UserError:
            self._end()
            raise
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenise")
        self._failure: UserError | None = None
        for process in self._processes:
            self._begin(process)
            self._idle.put(process)

    def _begin(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):  # it has ended; its first batch reports that
            _send(process, self._start_message)

    def submit(self, batch: Batch) -> Future[Encoded]:
        return self._threads.submit(self._ask, batch)

    def _ask(self, batch: Batch) -> Encoded:
        process = self._idle.get()
        try:
            if self._failure is not None:  # of another batch: this process may have ended
                raise self._failure
            answer = _answer(process, batch)
        except ENDED as error:
            another = self._start_another()
            if another is None:
                raise
            self._failure = self._name_document(process, another, batch)
            raise self._failure from error
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start_another(self) -> subprocess.Popen[bytes] | None:
        """A new process; None if all are being ended, and so the one that has ended did not crash."""
        with self._start_or_end:
            if self._is_ending:
                return None
            process = _start()
            self._processes.append(process)
        self._begin(process)
        return process

    def _name_document(
        self, ended: subprocess.Popen[bytes], process: subprocess.Popen[bytes], batch: Batch
    ) -> UserError:
        """The error for a process that has ended: a new `process` tokenises its documents one by one."""
        for text, place in zip(*batch, strict=True):
            try:
                _answer(process, Batch([text], [place]))
            except ENDED:
                return _ended(process, f"at {place}, which begins {text[:40]!r}", is_known=True)
        documents = f"{len(batch.places)} documents, from {batch.places[0]} to {batch.places[-1]}"
        return _ended(ended, f"at {documents}, each of which a new process has tokenised", is_known=False)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._start_or_end:  # no process starts from here on
            self._is_ending = True
            for process in self._processes:  # first, because threads may wait for their answers
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was still to be written
                    pipe.close()
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    paths = json.dumps([path or os.getcwd() for path in sys.path])  # noqa: PTH109 - "" is the working folder
    # Ctrl-C reaches all processes, and the parent ends the others. They inherit the mask, so an interrupt
    # while one starts prints no traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
        )
    except OSError as error:  # too many processes, or too little memory
        raise UserError(
            f"processes that tokenise cannot be started ({error.strerror or error}): lower data.workers"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes], batch: Batch) -> Encoded | Exception:
    """What the process makes of a batch; raises one of `ENDED` if it has ended."""
    assert process.stdout is not None
    _send(process, pickle.dumps(batch))
    answer: Encoded | Exception = pickle.load(process.stdout)
    return answer


def _ended(process: subprocess.Popen[bytes], where: str, *, is_known: bool) -> UserError:
    process.kill()
    code = process.wait()
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    remedy = "mend the document" if is_known else "start again"
    if code == -signal.SIGKILL:  # as the kernel does
        remedy = "if memory was short, lower data.workers"
    return UserError(f"a process that tokenises has ended {how} {where}: {remedy}")


def serve() -> None:
    """Answer batches from stdin with ids on stdout, until stdin ends: the program of each process."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print must not be taken for an answer
        try:
            _serve(sys.stdin.buffer, answers)
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has ended; without a traceback from closing the pipe


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    tokenizer, has_end = pickle.load(requests)
    while True:
        batch = Batch(*pickle.load(requests))
        answer: Encoded | Exception
        try:
            answer = _encode_named(tokenizer, batch, has_end=has_end)
        except UserError as error:
            answer = error
        except Exception:  # its type may not be picklable
            answer = RuntimeError(f"a process that tokenises has failed:\n{traceback.format_exc()}")
        pickle.dump(answer, answers)
        answers.flush()
