"""Adapter from our grad scaler to the `loss_scaler` of DeepSpeed's ZeRO optimizers.

DeepSpeed reads the scale before backward and again when it unscales gradients, but reports overflows in
between. A scaler that adapts at that moment would unscale with another scale than the gradients have.
Therefore `update_scale` does nothing here, and `take_step` updates our scaler after the step. In checkpoints
the scaler is plain data; the scaler of another program is rejected and never installed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.loss_scale.constant import ConstantGradScaler

logger = logging.getLogger(__name__)

FORMAT = "megalowbit_grad_scaler"


class ZeroLossScaler:
    """The loss scaler interface of ZeRO optimizers over our scaler; without a scaler the scale is 1."""

    def __init__(self, grad_scaler: GradScaler | None) -> None:
        self.grad_scaler = grad_scaler

    @property
    def cur_scale(self) -> float:
        """Loss scale of the next backward; 1 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if self.grad_scaler is None:
            raise UserError(f"loss_scale = {value!r} cannot be set without a grad scaler: configure one")
        self.grad_scaler.scale = float(value)

    @property
    def loss_scale(self) -> float:
        """DeepSpeed's other name for `cur_scale`."""
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return self.grad_scaler is not None and not isinstance(self.grad_scaler, ConstantGradScaler)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the scale in fp32, because the scale may exceed half precision's range."""
        return loss if self.grad_scaler is None else loss.float() * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Called by DeepSpeed in the middle of its step, which is too early to change the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data; `grad_scaler` is None if there is no scaler."""
        state = None if self.grad_scaler is None else self.grad_scaler.state_dict()
        return {"format": FORMAT, "grad_scaler": state}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state returned by `state_dict`.

        If the state has no scaler, this one keeps its initial scale, with a warning.

        Raises:
            UserError: the state is something else, such as DeepSpeed's scaler; nothing has changed then.
        """
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise UserError(
                f"the checkpoint holds a loss scaler of another program ({type(state).__name__}), which is "
                "not installed: start from its weights instead"
            )
        saved = state["grad_scaler"]
        if self.grad_scaler is not None and saved is None:
            logger.warning("the checkpoint has no loss scale: it starts at %g", self.grad_scaler.scale)
        elif self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(saved)
