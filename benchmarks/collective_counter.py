"""Every collective that a process takes part in: what, how many bytes, and which file asked for it.

Counted where all of them pass, at the methods of torch's `ProcessGroup`: collectives of Python objects show
as the tensors that they are sent as. Whoever asked is the innermost frame of megalowbit or of DeepSpeed; what
for is told by the functions around it. Not covered: talk to the store, such as the watchdog's beats.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup

# place of what a rank gives among the arguments; outputs come first
GIVEN_AT = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "send": 0,
    "recv": 0,
    "barrier": None,
    "monitored_barrier": None,
    **dict.fromkeys(
        (
            "allgather",
            "_allgather_base",
            "all_gather_single",
            "allgather_coalesced",
            "allgather_into_tensor_coalesced",
            "all_gather_single_coalesced",
            "gather",
            "scatter",
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_single",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_single_coalesced",
            "alltoall",
            "alltoall_base",
            "all_to_all_single",
        ),
        1,
    ),
}
PACKAGES = ("megalowbit", "deepspeed")
PLUMBING = ("deepspeed/comm/", "deepspeed/utils/", "megalowbit/distributed/agreement.py")
PHASES = {
    "train_step": "step",
    "plain_step": "step",
    "save_together": "save",
    "save": "save",
    "latest": "load",
    "load_together": "load",
    "rank_state": "load",
    "reduce_layers": "overflow table",
    "export": "export",
}


class Collective(NamedTuple):
    """One call.

    Attributes:
        phase: "start", "step", "save", "load", "overflow table", "export".
        asked_by: file of megalowbit or DeepSpeed, from the package on.
        kind: the method's name.
        dtype: of what is given; "" for a barrier.
        size: bytes that this rank gives.
    """

    phase: str
    asked_by: str
    kind: str
    dtype: str
    size: int


class CollectiveCounter:
    """Keeps all calls from `install` on, in order."""

    def __init__(self) -> None:
        self.seen: list[Collective] = []

    def install(self) -> None:
        """Count from now on, in all groups; once in a process."""
        for name, place in GIVEN_AT.items():
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._counting(getattr(ProcessGroup, name), name, place))

    def _counting(self, original: Any, name: str, place: int | None) -> Any:
        def counted(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
            given = [] if place is None or len(arguments) <= place else list(_tensors(arguments[place]))
            size = sum(tensor.numel() * tensor.element_size() for tensor in given)
            dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
            phase, asked_by = _where(sys._getframe(1))
            self.seen.append(Collective(phase, asked_by, name.strip("_"), dtype, size))
            return original(group, *arguments, **named)

        return counted


def steps_of(seen: Iterable[Collective], last: str) -> list[list[Collective]]:
    """The collectives of each step, which ends with the one that the file `last` asks for."""
    steps: list[list[Collective]] = [[]]
    for each in seen:
        if each.phase == "step":
            steps[-1].append(each)
            if each.asked_by.endswith(last):
                steps.append([])
    return [step for step in steps if step]


def summed(seen: Iterable[Collective]) -> dict[tuple[str, str, str], list[int]]:
    """Calls and bytes by file, kind and type."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in seen:
        row = sums[each.asked_by, each.kind, each.dtype]
        row[0] += 1
        row[1] += each.size
    return dict(sums)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _where(frame: FrameType | None) -> tuple[str, str]:
    phase, asked_by = "start", "other"
    while frame is not None:
        path = Path(frame.f_code.co_filename).as_posix()
        name = next((path[path.rindex(f"/{p}/") + 1 :] for p in PACKAGES if f"/{p}/" in path), None)
        if name is not None and asked_by == "other" and not name.startswith(PLUMBING):
            asked_by = name
        if frame.f_code.co_name in PHASES and phase == "start" and (name or "plain" in frame.f_code.co_name):
            phase = PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return phase, asked_by
