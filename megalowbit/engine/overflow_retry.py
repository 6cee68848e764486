"""Repeats a step that overflowed at a lower loss scale, instead of losing its batch.

An overflow costs a batch of data and, with hysteresis, perhaps a second one before the loss scale S falls.
A snapshot of the state that a forward pass changes (random generators, buffers such as running means, and
what else the caller names) allows the same batches to be repeated. The result equals the step that the lower
S would have made in the first place. Weights, moments and learning rate need no snapshot, because a skipped
step does not change them. For an engine the snapshot also covers its counters, which skipped steps change,
and the positions of low-bit layers. A step that succeeds in the end counts as one applied step; one that
never succeeds counts as one skipped step.

All ranks of a step see the same overflow and the same S, so they retry together. If no scale helps, as with a
NaN in the loss, all retries are made and S ends that much lower: keep their number small. The caller must
keep
the batches. Not covered: the engine's throughput timer, which counts repeated work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from megalowbit.distributed.generator_states import random_state, restore_random_state
from megalowbit.errors import UserError
from megalowbit.layers.conversion.carried_state import restore_layers, take_layers
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.values import is_count

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")  # of an engine

SaveAndRestore = tuple[Callable[[], Any], Callable[[Any], object]]
Result = TypeVar("Result")


class StepSnapshot:
    """State before a step: torch's generators, the model's buffers, and further state on request.

    Args:
        model: its buffers are copied, on their devices, and the generators of these devices are saved.
        also: pairs `(save, restore)`. `save()` is called now; `restore` gets its result later, possibly
            several times, so it must not modify it.
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
        """Restore the saved state; may be called several times."""
        torch.set_rng_state(self._generator)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            module._buffers[name] = buffer  # a forward may have replaced the tensor
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
    """Take a step; if it overflows, repeat it at a lower loss scale. Every rank of the step must call it.

        batches = [next(loader) for _ in range(accumulation)]

        def run():
            for batch in batches:
                optimizer.scale_loss(model(batch) / accumulation).backward()
            return optimizer.step()

        report, retries = retry_step(run, StepSnapshot(model), optimizer.grad_scaler, max_retries=3)
        if report.is_applied:
            scheduler.step()

    Args:
        run: processes all micro-batches of the step, the same ones each time, and steps the optimizer.
        snapshot: taken before the first micro-batch.
        scaler: the optimizer's grad scaler; None: the step is never repeated.
        max_retries: maximum number of retries, ≥ 0.
        layer_scaling: the optimizer's layer scaling. If a step has lowered one of its factors, S stays.
        is_applied: whether an attempt updated the weights, given the result of `run`.

    Returns:
        The result of the last `run`, and the number of retries. Retrying stops early if S is constant or at
        its minimum.

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
    """Take an optimizer step of the engine; if it overflows, repeat it at a lower scale. Collective.

        batches = [next(loader) for _ in range(engine.gradient_accumulation_steps())]

        def run():
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()

        _, retries = retry_engine_step(engine, run, max_retries=3)

    Args:
        engine: from `megalowbit.initialize`.
        run: processes all micro-batches of one optimizer step, the same ones each time.
        max_retries: maximum number of retries, ≥ 0.

    Returns:
        The result of the last `run`, and the number of retries.

    Raises:
        UserError: called in the middle of an optimizer step.
    """
    accumulation = engine.gradient_accumulation_steps()
    if engine.micro_steps % accumulation:
        raise UserError(
            f"a step can only be retried from its first micro-batch, but {engine.micro_steps % accumulation} "
            f"of {accumulation} are done: call retry_engine_step before the first"
        )
    snapshot = StepSnapshot(engine.module, also=_engine_state(engine))
    optimizer = engine.optimizer
    layer_scaling = getattr(optimizer, "layer_scaling", None)  # only if it is configured
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
    """Whether a retry has a lower scale; lowers S here if the step has not (hysteresis)."""
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
