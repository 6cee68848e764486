"""Our optimizers with the interface that DeepSpeed's engine expects at ZeRO stage 0.

The engine scales the loss, reduces gradients and reports overflow through methods of `ZeROOptimizer`, so our
classes derive from it. The engine reduces what `get_grads_for_reduction` returns: here one contiguous fp32
buffer, in place. `step` does the rest, including clipping. The engine's clipping must stay off, because it
would clip `.grad` before the gradients are divided by the loss scale. tests/engine/contract/ checks every
name that the engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import maybe_loss_for_backward

from megalowbit.distributed import process_group
from megalowbit.engine.parameters.full_values import link_values, unlink_values
from megalowbit.engine.parameters.user_gradients import NO_GRADIENTS
from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer


class EngineSurface(ZeROOptimizer, MegatronOptimizer):
    """The attributes and methods that the engine uses; mixed into a concrete optimizer."""

    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self.found_inf

    @property
    def _global_grad_norm(self) -> float | None:
        return self.grad_norm

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name for `loss_scale`."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale can change."""
        return self.grad_scaler is not None and not isinstance(self.grad_scaler, ConstantGradScaler)

    def needs_scaler(self) -> bool:
        """Whether the loss must pass through `scale_if_loss` before backward."""
        return self.grad_scaler is not None

    def scale_if_loss(self, value: Any) -> Any:
        """Multiply a loss by the loss scale; return any other value unchanged."""
        if self.grad_scaler is not None and maybe_loss_for_backward(value):
            return self.scale_loss(value)
        return value

    def get_grads_for_reduction(self) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Gradients to average over data-parallel ranks, and expert gradients (none)."""
        if self.grad_buffer is None or not self.grad_buffer.flat.numel():
            return [], {}
        is_alone = process_group.world_size() == 1
        return [self.grad_buffer.flat if is_alone else self.grad_buffer.before_reduction()], {}

    def refresh_fp32_params(self) -> None:
        """Called after only the module's weights were loaded."""
        self.reload_model_params()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True, **_: Any
    ) -> None:
        """Continue from a saved state; DeepSpeed's further arguments apply to ZeRO only."""
        MegatronOptimizer.load_state_dict(self, state_dict, load_optimizer_states)

    def begin_step(self, loss_scale: float) -> None:
        """Reject a step without gradients, in which the moments alone would change the weights."""
        self.left_out.check()  # first, because those gradients do not count
        if not self.gradients.exist():
            raise UserError(NO_GRADIENTS)
        super().begin_step(loss_scale)

    def destroy(self) -> None:
        """Called when the engine is destroyed: parameters get ordinary gradients again."""
        self.is_destroyed = True
        unlink_values(self)
        self.instruments.detach()
        if self.grad_buffer is not None:
            self.grad_buffer.detach()


class DeepSpeedFloat16Optimizer(EngineSurface, Float16OptimizerWithFloat16Params):
    """`Float16OptimizerWithFloat16Params` inside DeepSpeed's engine."""

    def __init__(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        ZeROOptimizer.__init__(self)
        Float16OptimizerWithFloat16Params.__init__(self, optimizer, **arguments)
        link_values(self)


class DeepSpeedFP32Optimizer(EngineSurface, FP32Optimizer):
    """`FP32Optimizer` inside DeepSpeed's engine."""

    def __init__(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        ZeROOptimizer.__init__(self)
        FP32Optimizer.__init__(self, optimizer, **arguments)
        link_values(self)
