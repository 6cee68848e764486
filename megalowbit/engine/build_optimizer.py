"""The optimizer of a run that starts: chosen before the engine, built inside its start, finished after it.

At stage 0 ours is the engine's optimizer. From stage 1 on DeepSpeed wraps the plain one in its own, which is
made ours once the engine stands.
"""

from __future__ import annotations

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
from megalowbit.engine.zero.start import ZERO_KEYS, ZeroStart
from megalowbit.layers.regularizer import build_regularizer
from megalowbit.optim.schedules.scheduler import LRScheduler


class OptimizerStart:
    """Called by `deepspeed.initialize` for the optimizer of a prepared model; then `finish` is due.

    Norm and overflow are reduced over `groups`.

    Attributes:
        regularizer: at work, or None.
        deepspeed_keys: what must be added to DeepSpeed's configuration.

    Raises:
        UserError: what was passed does not fit the model; all ranks raise it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parts: DeepSpeedConfigParts,
        *,
        groups: GroupsOfRank | None,
        optimizer: ClientOptimizer | None,
        model_parameters: ModelParameters | None,
    ) -> None:
        self._model, self._parts, self._groups, self._client = model, parts, groups, optimizer
        self._trained = succeed_together(groups_to_train, model, optimizer, model_parameters, parts.deepspeed)
        parameters = [parameter for group in self._trained for parameter in group["params"]]
        self.regularizer = build_regularizer(model, parts.settings.regularizer, parameters)
        self._zero: ZeroStart | None = None
        self.deepspeed_keys: dict[str, Any] = {}
        if zero_stage(parts.deepspeed):
            self.deepspeed_keys = dict(ZERO_KEYS)
            self._zero = ZeroStart(model, parts, mpu=groups, regularizer=self.regularizer)

    def __call__(self, _: object) -> torch.optim.Optimizer:
        """Build it; the model has been moved and broadcast in fp32, or cast already at stages above 0."""
        client = self._client
        if client is None:
            inner = build_optimizer(self._parts.deepspeed["optimizer"], self._trained)
        else:
            inner = succeed_together(client_optimizer, self._model, client, self._trained)
        if self._zero is not None:
            return self._zero.inner(inner)
        return wrap_optimizer(inner, self._model, self._parts, mpu=self._groups, regularizer=self.regularizer)

    def schedule(self, lr_scheduler: Any) -> Any:
        """For `deepspeed.initialize`: what makes our scheduler, or `lr_scheduler`, the user's or None."""
        settings = self._parts.settings.lr_schedule
        return lr_scheduler if settings is None else partial(LRScheduler, schedule=settings)

    def finish(self, engine: Any) -> None:
        """To be called once the engine stands; collective over all ranks."""
        if self._zero is not None:
            self._zero.finish(engine)


def build_optimizer(block: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The torch optimizer of a filled `optimizer` block; a group's own `weight_decay` wins over it."""
    params = dict(block["params"])
    if block["type"] == "SGD":
        return torch.optim.SGD(groups, fused=True, **params)
    is_decoupled = params.pop("adam_w_mode")
    params.pop("bias_correction")
    params.pop("torch_adam")
    params["betas"] = tuple(params["betas"])
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, fused=True, **params)
