"""A step of DeepSpeed's engine that overflowed, done again at a lower scale.

`optim.step_retry` with what an engine adds: its counters, which move on skipped steps too, all random number
generators of the process, and where the low-bit layers are. A step that succeeds in the end counts as one
applied step: learning rate and data move on once, `skipped_steps` not at all. One that never does counts as
one skipped step. The counters are held by tests/engine/contract/.
Not covered: the engine's throughput timer, which measures the work that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megalowbit.distributed.generator_states import random_state, restore_random_state
from megalowbit.errors import UserError
from megalowbit.layers.carried_state import restore_layers, take_layers
from megalowbit.optim.step_retry import SaveAndRestore, StepSnapshot, retry_step

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Try(Generic[Result]):
    """What `run` returned, and whether the engine's step moved the weights."""

    result: Result
    is_applied: bool


def retry_engine_step(
    engine: Any, run: Callable[[], Result], *, max_retries: int, also: Iterable[SaveAndRestore] = ()
) -> tuple[Result, int]:
    """Take an optimizer step of the engine, again at a lower scale if it overflowed. Collective.

        batches = [next(loader) for _ in range(engine.gradient_accumulation_steps())]

        def run():
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()

        _, retries = retry_engine_step(engine, run, max_retries=3)

    Args:
        engine: from `megalowbit.initialize`.
        run: goes through all micro-batches of one optimizer step, the same ones each time.
        max_retries: how often at most, ≥ 0.
        also: further pairs `(save, restore)`, see `StepSnapshot`.

    Returns:
        What the last `run` returned, and the number of tries after the first.

    Raises:
        UserError: called in the middle of an optimizer step.
    """
    accumulation = engine.gradient_accumulation_steps()
    if engine.micro_steps % accumulation:
        raise UserError(
            f"a step can be retried from its first micro-batch only, and {engine.micro_steps % accumulation} "
            f"of {accumulation} are done: call retry_engine_step before the first"
        )

    def attempt() -> _Try[Result]:
        result = run()
        return _Try(result, engine.was_step_applied())

    snapshot = StepSnapshot(engine.module, also=[*_engine_state(engine), *also])
    optimizer = engine.optimizer
    layer_scaling = getattr(optimizer, "layer_scaling", None)  # only where factors were asked for
    last, retries = retry_step(
        attempt, snapshot, optimizer.grad_scaler, max_retries, layer_scaling=layer_scaling
    )
    return last.result, retries


def _engine_state(engine: Any) -> list[SaveAndRestore]:
    device, module = engine.device, engine.module

    def restore_counters(saved: dict[str, int]) -> None:
        for name, value in saved.items():
            setattr(engine, name, value)

    return [
        (lambda: {name: getattr(engine, name) for name in COUNTERS}, restore_counters),
        (lambda: random_state(device), lambda state: restore_random_state(state, device)),
        (lambda: take_layers(module), lambda state: restore_layers(module, state)),
    ]
