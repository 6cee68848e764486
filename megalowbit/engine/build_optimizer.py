"""Builds the optimizer of a run in three parts: before, inside and after `deepspeed.initialize`.

At stage 0 our optimizer is the engine's optimizer. From stage 1 on DeepSpeed wraps the plain optimizer in its
ZeRO optimizer, which gets our class once the engine is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.config.zero import zero_stage
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.engine.model_optimizer import (
    ClientOptimizer,
    ModelParameters,
    client_optimizer,
    groups_to_train,
    wrap_optimizer,
)
from megalowbit.engine.parameters.initial_weights import InitialWeights
from megalowbit.engine.zero.start import ZERO_KEYS, ZeroStart
from megalowbit.errors import UserError
from megalowbit.layers.regularizer import build_regularizer
from megalowbit.optim.optimizers.left_out import LeftOutParameters
from megalowbit.optim.schedules.scheduler import LRScheduler


class OptimizerStart:
    """Passed to `deepspeed.initialize`, which calls it for the optimizer; call `finish` afterwards.

    Norm and overflow are reduced over `groups`. `initial` are the weights of a model that was on the meta
    device; `finish` fills it, unless its ZeRO stage is 0.

    Attributes:
        regularizer: the dual-range regulariser, or None.
        deepspeed_keys: keys to add to DeepSpeed's configuration.

    Raises:
        UserError: optimizer or parameters do not fit the model; all ranks raise it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parts: DeepSpeedConfigParts,
        *,
        groups: GroupsOfRank | None,
        optimizer: ClientOptimizer | None,
        model_parameters: ModelParameters | None,
        initial: InitialWeights | None = None,
    ) -> None:
        self._model, self._parts, self._groups, self._client = model, parts, groups, optimizer
        self._trained = succeed_together(groups_to_train, model, optimizer, model_parameters, parts.deepspeed)
        parameters = [parameter for group in self._trained for parameter in group["params"]]
        self.regularizer = build_regularizer(model, parts.settings.regularizer, parameters)
        self._trains_model = model_parameters is None and not isinstance(optimizer, torch.optim.Optimizer)
        self._zero: ZeroStart | None = None
        self.deepspeed_keys: dict[str, Any] = {}
        if zero_stage(parts.deepspeed):
            self.deepspeed_keys = dict(ZERO_KEYS)
            self._zero = ZeroStart(model, parts, mpu=groups, regularizer=self.regularizer, initial=initial)

    def __call__(self, _: object) -> torch.optim.Optimizer:
        """Build the optimizer. DeepSpeed has moved and broadcast the model, and cast it at stages above 0."""
        client = self._client
        if client is None:
            inner = build_optimizer(self._parts.deepspeed["optimizer"], self._trained)
        else:
            inner = succeed_together(client_optimizer, self._model, client, self._trained)
        if self._zero is not None:
            self._add_left_out(self._zero.left_out)
            return self._zero.inner(inner)
        wrapped = wrap_optimizer(
            inner, self._model, self._parts, mpu=self._groups, regularizer=self.regularizer
        )
        self._add_left_out(wrapped.left_out)
        return wrapped

    def _add_left_out(self, left_out: LeftOutParameters) -> None:
        """Add the model's frozen parameters, unless the user has chosen what to train."""
        if self._trains_model:
            left_out.add_frozen(self._model.named_parameters())

    def schedule(self, lr_scheduler: Any) -> Any:
        """The `lr_scheduler` for `deepspeed.initialize`: a factory of ours, the user's, or None."""
        settings = self._parts.settings.lr_schedule
        if settings is not None:
            return partial(LRScheduler, schedule=settings)
        return lr_scheduler

    def finish(self, engine: Any) -> None:
        """Finish the optimizer of the engine that was built; collective over all ranks."""
        if self._zero is not None:
            self._zero.finish(engine)
        engine._take_model_step = partial(take_step_with_arguments, engine, engine._take_model_step)


def take_step_with_arguments(engine: Any, take_step: Callable[[Any], None], lr_kwargs: Any = None) -> None:
    """Replaces `engine._take_model_step`: refuse a step whose scheduler lacks an argument that it needs.

    DeepSpeed would pass the batch size, as the metric of `ReduceLROnPlateau`, or as the epoch.
    """
    if engine.lr_scheduler is not None:
        _check_scheduler_arguments(engine.lr_scheduler, lr_kwargs or {})
    take_step(lr_kwargs)


def _check_scheduler_arguments(scheduler: Any, arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(scheduler.step)
    except ValueError:  # a method in C
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{type(scheduler).__name__}.step{signature} can't be called with {arguments} ({error}): call "
            "engine.step(lr_kwargs={...}) with its needs, or leave out lr_scheduler= and call step yourself"
        ) from None


def build_optimizer(block: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The torch optimizer of a complete `optimizer` block; a group's `weight_decay` overrides the block's."""
    params = dict(block["params"])
    if block["type"] == "SGD":
        return torch.optim.SGD(groups, fused=True, **params)
    is_decoupled = params.pop("adam_w_mode")
    params.pop("bias_correction")
    params.pop("torch_adam")
    params["betas"] = tuple(params["betas"])
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, fused=True, **params)
