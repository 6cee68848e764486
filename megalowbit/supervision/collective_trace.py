"""Describes where a thread is (which collective, called from where), and recognises failed collectives.

A stack is read from its innermost frame outwards. The frames in torch.distributed and deepspeed.comm give
the collective's name; the first frame outside them and our wrappers is its caller. Python has no frame for a
wait on an operation that was started earlier, so such a wait is recognised by its source line
(`handle.wait()`).

Transport errors are recognised by their text, because gloo raises plain `RuntimeError`s. Mismatched sizes
(`enforce fail`) are bugs, although gloo reports them too. Not covered: on a GPU, a host that waits for other
ranks is reading a number. The trace names that place but not the collective.
"""

from __future__ import annotations

import itertools
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch.distributed as dist

COMMUNICATION = ("torch/distributed/", "deepspeed/comm/")
WRAPPERS = (
    "torch/utils/_contextlib.py",
    "contextlib.py",
    "deepspeed/utils/timer.py",
    "megalowbit/distributed/agreement.py",
    "megalowbit/distributed/collectives.py",
)
INNER_NAMES = frozenset({"wrapper", "log_wrapper", "decorate_context", "wait"})  # never a collective's name
LIBRARIES = ("torch/", "deepspeed/", "megalowbit/")  # in these, `.wait(` waits for other ranks
ALWAYS = re.compile(
    r"gloo/transport|NCCL (error|communicator|operation|timeout)|collective operation timeout"
)
NEAR_COLLECTIVES = re.compile(
    r"connection (closed|reset|refused|timed out)|timed out|broken pipe|network is unreachable"
    r"|no route to host|socket|transport",
    re.IGNORECASE,
)
NEVER = re.compile(r"enforce fail")


class CollectiveTrace(NamedTuple):
    """Where a thread is.

    Attributes:
        text: `"all_reduce (telemetry/step_facts.py:92 reduce_step_facts)"`, or only the place.
        is_waiting: the thread waits for other ranks in a collective.
    """

    text: str
    is_waiting: bool


class _Frame(NamedTuple):
    file: str
    line: int
    function: str


def trace_of_frame(frame: FrameType | None) -> CollectiveTrace:
    """Where a running thread is, given its innermost frame."""
    frames = []
    while frame is not None:
        frames.append(_Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return _trace(frames)


def trace_of_error(error: BaseException) -> CollectiveTrace:
    """Where an error was raised; for a chain of errors, where the first one was."""
    *_, root = _chain(error)
    return _trace(_frames_of(root.__traceback__))


def is_failed_collective(error: BaseException) -> bool:
    """Whether an error means that other ranks could not be reached, rather than a bug or a user error."""
    return any(_is_transport_error(each) for each in _chain(error))


def _is_transport_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or NEVER.search(str(error)):
        return False
    if ALWAYS.search(str(error)):
        return True
    is_near = any(_is_communication(frame.file) for frame in _frames_of(error.__traceback__))
    return is_near and NEAR_COLLECTIVES.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then its cause, and so on to the first."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _frames_of(trace: TracebackType | None) -> list[_Frame]:
    """Innermost first."""
    walked = [
        _Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
    ]
    return walked[::-1]


def _trace(frames: list[_Frame]) -> CollectiveTrace:
    if not frames:
        return CollectiveTrace("no Python code", False)
    inside = list(itertools.takewhile(lambda frame: _is_wrapper(frame.file), frames))
    # if all frames are wrappers, the thread was started in the last of them
    caller = frames[len(inside)] if len(inside) < len(frames) else frames[-1]
    name = _collective(inside)
    if name is None and _waits(caller):
        name = "wait"
    if name is not None:
        return CollectiveTrace(f"{name} ({_place(caller)})", True)
    # inside a library, also name the caller's code
    own = next((frame for frame in frames[len(inside) :] if not _is_installed(frame.file)), caller)
    text = _place(caller) if own is caller else f"{_place(caller)}, from {_place(own)}"
    return CollectiveTrace(text, False)


def _collective(inside: Iterable[_Frame]) -> str | None:
    """The outermost function of torch.distributed, ignoring wrappers; None if there is none."""
    names = [
        (frame.file, frame.function)
        for frame in inside
        if _is_communication(frame.file) and frame.function not in INNER_NAMES
    ]
    of_torch = [function for file, function in names if COMMUNICATION[0] in file]
    return of_torch[-1] if of_torch else names[-1][1] if names else None


def _waits(frame: _Frame) -> bool:
    is_ours = any(f"/{library}" in frame.file for library in LIBRARIES)
    return is_ours and ".wait(" in linecache.getline(frame.file, frame.line)


def _is_wrapper(file: str) -> bool:
    return _is_communication(file) or file.endswith(WRAPPERS)


def _is_communication(file: str) -> bool:
    return any(f"/{part}" in file for part in COMMUNICATION)


def _is_installed(file: str) -> bool:
    is_there = re.search(r"/site-packages/|/lib/python3|^<", file) is not None
    return is_there and "/megalowbit/" not in file


def _place(frame: _Frame) -> str:
    return f"{_short(frame.file)}:{frame.line} {frame.function}"


def _short(file: str) -> str:
    """The path relative to our package or to site-packages; otherwise its last two parts."""
    parts = Path(file).parts
    for folder in ("megalowbit", "site-packages"):
        if folder in parts[:-1]:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    return "/".join(parts[-2:])
