"""Step 5: where forward and backward wait for the GPU. Each wait empties its queue."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from benchmarks.first_hour.findings import Finding, at_most, info
from benchmarks.first_hour.layer import RECIPES, make, step_of
from benchmarks.first_hour.session import Session

READS = ("aten::_local_scalar_dense", "aten::nonzero")


def check(session: Session) -> Iterator[Finding]:
    """Reads of forward and backward by recipe, after the first steps."""
    shape = session.size((1024, 512, 512), (64, 64, 96))
    for name, goal in RECIPES.items():
        step = step_of(make(goal, shape, session.device), shape)
        for _ in range(3):
            step()
        if session.is_gpu:
            yield at_most(f"waits for the GPU, {name}", waits(step), 0, " waits")
        else:
            note, count = "on a GPU the limit is 0; this path is not used there", reads(step)
            yield info(f"host reads, {name}", count, " read" if count == 1 else " reads", note=note)


def waits(step: object) -> int:
    """Synchronising calls of a step, as torch warns of them."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()  # type: ignore[operator]
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    # torch also warns, once, that this mode is a prototype
    found = [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]
    print(*found, sep="\n")
    return len(found)


def reads(step: object) -> int:
    """Operations of a step that read a tensor's value."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()  # type: ignore[operator]
    return sum(each.count for each in profile.key_averages() if each.key in READS)
