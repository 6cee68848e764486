"""A step that overflowed, done again at a lower scale instead of being lost.

An overflow costs a whole batch of data and, with hysteresis, perhaps a second one before S falls. With a
snapshot of what a forward moves (random numbers, buffers such as running means, whatever else the caller
names) the same batches can be gone through again, so that the step is the one a lower S would have made at
once. Weights, moments and learning rate need no snapshot: a skipped step leaves them alone. An engine has
more that moves: its counters, on skipped steps too, and the places of low-bit layers. A step that succeeds in
the end counts as one applied step, one that never does as one skipped step.

Every rank that shares a step sees the same overflow and the same S, so all retry together. An overflow that
no scale cures, such as a NaN in the loss, costs all its retries and leaves S that much lower: keep them few.
Keeping the batches is the caller's. Not covered: the engine's throughput timer, which measures the work that
was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from megalowbit.distributed.generator_states import random_state, restore_random_state
from megalowbit.errors import UserError
from megalowbit.layers.carried_state import restore_layers, take_layers
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.values import is_count

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")  # of an engine

SaveAndRestore = tuple[Callable[[], Any], Callable[[Any], object]]
Result = TypeVar("Result")


class StepSnapshot:
    """State before a step: torch's generators, the model's buffers, and more if asked for.

    Args:
        model: whose buffers are copied, on their devices, and whose devices' generators are saved.
        also: pairs `(save, restore)`; `save()` is called now, and `restore` later with what it returned, any
            number of times, so it must not give it away to be changed.
    """

    def __init__(self, model: nn.Module, *, also: Iterable[SaveAndRestore] = ()) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._generator = torch.get_rng_state()
        self._cuda = {
            device: torch.cuda.get_rng_state(device)
            for device in sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
        }
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._also = [(restore, save()) for save, restore in also]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; may be called again."""
        torch.set_rng_state(self._generator)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            module._buffers[name] = buffer  # a forward may have put another tensor there
        for restore, state in self._also:
            restore(state)


def retry_step(
    run: Callable[[], Result],
    snapshot: StepSnapshot,
    scaler: GradScaler | None,
    max_retries: int,
    *,
    layer_scaling: LayerScaling | None = None,
    is_applied: Callable[[Result], bool] = attrgetter("is_applied"),
) -> tuple[Result, int]:
    """Take a step, again at a lower scale if it overflowed. Every rank of the step must call it.

        batches = [next(loader) for _ in range(accumulation)]

        def run():
            for batch in batches:
                optimizer.scale_loss(model(batch) / accumulation).backward()
            return optimizer.step()

        report, retries = retry_step(run, StepSnapshot(model), optimizer.grad_scaler, max_retries=3)
        if report.is_applied:
            scheduler.step()

    Args:
        run: goes through all micro-batches of the step, the same ones each time, and steps the optimizer.
        snapshot: taken before the first of them.
        scaler: of the optimizer; None cannot be lowered, so nothing is retried.
        max_retries: how often at most, ≥ 0.
        layer_scaling: of the optimizer. Where a step has lowered one of its factors, S stays.
        is_applied: whether a try has moved the weights, from what `run` returned.

    Returns:
        What the last `run` returned, and the number of tries after the first. It stops early where S is at
        its floor or constant.

    Raises:
        UserError: `max_retries` is not a whole number ≥ 0.
    """
    if not is_count(max_retries, least=0):
        raise UserError(
            f"max_retries = {max_retries!r} is not valid: use a whole number ≥ 0, 0 never retries"
        )
    retries = 0
    while True:
        before = _scales(scaler, layer_scaling)
        result = run()
        if is_applied(result) or retries == max_retries or not _is_lowered(scaler, layer_scaling, before):
            return result, retries
        snapshot.restore()
        retries += 1


def retry_engine_step(engine: Any, run: Callable[[], Result], *, max_retries: int) -> tuple[Result, int]:
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
    snapshot = StepSnapshot(engine.module, also=_engine_state(engine))
    optimizer = engine.optimizer
    layer_scaling = getattr(optimizer, "layer_scaling", None)  # only where factors were asked for
    return retry_step(
        run,
        snapshot,
        optimizer.grad_scaler,
        max_retries,
        layer_scaling=layer_scaling,
        is_applied=lambda _: engine.was_step_applied(),
    )


def _scales(scaler: GradScaler | None, layer_scaling: LayerScaling | None) -> tuple[float, dict[str, float]]:
    scale = 1.0 if scaler is None else scaler.scale
    return scale, {} if layer_scaling is None else layer_scaling.factors


def _is_lowered(
    scaler: GradScaler | None, layer_scaling: LayerScaling | None, before: tuple[float, dict[str, float]]
) -> bool:
    """Whether the coming try has a lower scale; seen to here where the step itself has not (hysteresis)."""
    scale, factors = _scales(scaler, layer_scaling)
    is_lower = scale < before[0] or any(factors[name] < factor for name, factor in before[1].items())
    return is_lower or (scaler is not None and scaler.back_off())


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
