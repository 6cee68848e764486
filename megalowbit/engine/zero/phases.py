"""What is put around DeepSpeed's step: timers by phase, and learning rates as the update is to see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megalowbit.optim.timers import StepTimers


class PhaseTimers:
    """Our timers by name of phase where DeepSpeed's code calls its own."""

    def __init__(self, deepspeed_timers: Any, ours: StepTimers | None = None) -> None:
        self.deepspeed_timers = deepspeed_timers
        self.ours = ours

    def __call__(self, name: str) -> Any:
        return self.deepspeed_timers(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.deepspeed_timers, name)

    def milliseconds(self) -> dict[str, float]:
        """Of our phases; empty where nobody asked for times."""
        return self.ours.milliseconds() if self.ours is not None else {}


@contextmanager
def scaled_learning_rates(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let a step see `lr` times `lr_scale` where a group has one; schedulers go on seeing `lr`."""
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
