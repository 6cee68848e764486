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
    batches: Iterator[list[str]], tokenizer: Encoder, workers: int | None, *, has_end: bool = True
) -> Iterator[Encoded]:
    """Tokenise batches, and yield them in their order.

    Args:
        batches: texts of documents.
        tokenizer: must be picklable if there are several processes.
        workers: number of processes; 1: this one; None: this one for the first 32 Mi characters, and then as
            many as there are CPUs, at most 16.
        has_end: append the end-of-document id to each document.

    Raises:
        UserError: a process was killed; the message names its documents.
    """
    count = workers or min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0)))
    if workers is None or count == 1:
        num_characters = 0
        for texts in batches:
            yield encode(tokenizer, texts, has_end=has_end)
            num_characters += sum(map(len, texts))
            if count > 1 and num_characters >= CHARACTERS_BEFORE_START:
                break
    if count > 1:
        yield from _in_processes(batches, tokenizer, count, has_end=has_end)


def _in_processes(
    batches: Iterator[list[str]], tokenizer: Encoder, count: int, *, has_end: bool
) -> Iterator[Encoded]:
    first = next(batches, None)
    if first is None:
        return
    with _Workers(tokenizer, count, has_end=has_end) as workers:
        pending: deque[Future[Encoded]] = deque([workers.submit(first)])
        for texts in batches:
            pending.append(workers.submit(texts))
            if len(pending) >= 2 * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Workers:
    """The processes, and a thread for each that waits for its answers."""

    def __init__(self, tokenizer: Encoder, count: int, *, has_end: bool) -> None:
        start = pickle.dumps((tokenizer, has_end))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(count):
                self._processes.append(_start())
        except UserError:
            self._end()
            raise
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenise")
        for process in self._processes:
            with suppress(OSError):  # it has ended; its first batch reports that
                _send(process, start)
            self._idle.put(process)

    def submit(self, texts: list[str]) -> Future[Encoded]:
        return self._threads.submit(self._ask, texts)

    def _ask(self, texts: list[str]) -> Encoded:
        process = self._idle.get()
        try:
            _send(process, pickle.dumps(texts))
            assert process.stdout is not None
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise _ended(process, texts) from error
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> _Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _ended(process: subprocess.Popen[bytes], texts: list[str]) -> UserError:
    process.kill()
    code = process.wait()
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    return UserError(
        f"a process that tokenises has ended {how} at {len(texts)} documents of "
        f"{sum(map(len, texts)):,} characters, the first of which begins {texts[0][:40]!r}: if memory was "
        "short, lower data.workers"
    )


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
        texts = pickle.load(requests)
        answer: Encoded | Exception
        try:
            answer = encode(tokenizer, texts, has_end=has_end)
        except UserError as error:
            answer = error
        except Exception:  # its type may not be picklable
            answer = RuntimeError(f"a process that tokenises has failed:\n{traceback.format_exc()}")
        pickle.dump(answer, answers)
        answers.flush()
