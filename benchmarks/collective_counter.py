"""Counts every collective that a process takes part in: kind, bytes, and the file that issued it.

All collectives call the methods of torch's `ProcessGroup`, so these are counted. Collectives of Python
objects appear as the tensors they are sent as. The issuing file is that of the innermost frame of megalowbit
or DeepSpeed; the functions around it give the phase. Not covered: requests to the store, such as heartbeats.
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

# index of the input among the arguments; outputs come first
INPUT_INDEX = {
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
PLUMBING = (
    "deepspeed/comm/",
    "deepspeed/utils/",
    "megalowbit/distributed/agreement.py",
    "megalowbit/distributed/collectives.py",
)
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
    """One call of a collective.

    Attributes:
        phase: "start", "step", "save", "load", "overflow table", "export".
        issued_by: file of megalowbit or DeepSpeed; the path starts at the package.
        kind: the method's name.
        dtype: of the input; "" for a barrier.
        size: bytes of this rank's input.
    """

    phase: str
    issued_by: str
    kind: str
    dtype: str
    size: int


class CollectiveCounter:
    """Records all calls after `install`, in order."""

    def __init__(self) -> None:
        self.seen: list[Collective] = []

    def install(self) -> None:
        """Start counting, in all groups; call it once in a process."""
        for name, place in INPUT_INDEX.items():
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._counting(getattr(ProcessGroup, name), name, place))

    def _counting(self, original: Any, name: str, place: int | None) -> Any:
        def counted(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
            given = [] if place is None or len(arguments) <= place else list(_tensors(arguments[place]))
            size = sum(tensor.numel() * tensor.element_size() for tensor in given)
            dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
            phase, issued_by = _where(sys._getframe(1))
            self.seen.append(Collective(phase, issued_by, name.strip("_"), dtype, size))
            return original(group, *arguments, **named)

        return counted


def steps_of(seen: Iterable[Collective], last: str) -> list[list[Collective]]:
    """The collectives of each step, cut after the collective that the file `last` issues once a step.

    What follows the last cut is left out: with ZeRO, the gathering of the weights of the last step.
    """
    steps: list[list[Collective]] = [[]]
    for each in seen:
        if each.phase == "step":
            steps[-1].append(each)
            if each.issued_by.endswith(last):
                steps.append([])
    return steps[:-1]


def summed(seen: Iterable[Collective]) -> dict[tuple[str, str, str], list[int]]:
    """Calls and bytes by file, kind and dtype."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in seen:
        row = sums[each.issued_by, each.kind, each.dtype]
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
    phase, issued_by = "start", "other"
    while frame is not None:
        path = Path(frame.f_code.co_filename).as_posix()
        name = next((path[path.rindex(f"/{p}/") + 1 :] for p in PACKAGES if f"/{p}/" in path), None)
        if name is not None and issued_by == "other" and not name.startswith(PLUMBING):
            issued_by = name
        if frame.f_code.co_name in PHASES and phase == "start" and (name or "plain" in frame.f_code.co_name):
            phase = PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return phase, issued_by
