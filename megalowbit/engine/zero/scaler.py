"""Our loss scale where DeepSpeed's ZeRO optimizers keep theirs.

They ask `loss_scaler` for the scale before backward and again when they unscale, and tell it of overflows in
between: a scaler that adapts at once unscales by a scale that the gradients do not have, half of a growth
step. So nothing happens here when they tell; `take_step` updates our scaler once the step is over. In
checkpoints it is plain data, and what another program left there is refused and never installed.
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
    """What a ZeRO optimizer wants of a loss scaler, over ours; without one the scale is always 1."""

    def __init__(self, grad_scaler: GradScaler | None) -> None:
        self.grad_scaler = grad_scaler

    @property
    def cur_scale(self) -> float:
        """S by which the loss of the coming backward is multiplied; 1 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if self.grad_scaler is None:
            raise UserError(f"loss_scale = {value!r} cannot be set without a grad scaler: configure one")
        self.grad_scaler.scale = float(value)

    @property
    def loss_scale(self) -> float:
        """The same by DeepSpeed's other name."""
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return self.grad_scaler is not None and not isinstance(self.grad_scaler, ConstantGradScaler)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by S, in fp32: S itself may not exist in half precision."""
        return loss if self.grad_scaler is None else loss.float() * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Called by DeepSpeed in the middle of its step, too early to adapt anything."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data; `grad_scaler` is None where there is none."""
        state = None if self.grad_scaler is None else self.grad_scaler.state_dict()
        return {"format": FORMAT, "grad_scaler": state}

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` gave.

        A state without a scaler leaves this one at its initial value, with a warning.

        Raises:
            UserError: it is something else, such as DeepSpeed's own scaler; nothing has been changed then.
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
