"""One optimizer step on scaled fp32 gradients, the same for half-precision and fp32 models.

The order is Megatron's: inspect the scaled gradients, update the scaler, skip if any is non-finite, else
unscale and clip, step the masters, copy them to the model. Unscaling and clipping are one factor; torch's
fused optimizers apply it while they read the gradients, so these are read twice a step: once to look, once
to apply. A step leaves no gradient behind: one that stayed would be applied a second time. Which parameters
have masters is the business of the subclasses in `mixed_precision`.
Between steps others may change weights: `master_of`, `state_of`, then `masters_have_changed`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.distributed as dist

from megalowbit import process_group
from megalowbit.errors import UserError, unknown_name
from megalowbit.optim.grad_buffer import GradBuffer
from megalowbit.optim.grad_norm import (
    GradientFacts,
    GradientNorm,
    clip_coefficient,
    inspect_each_gradient,
    inspect_gradients,
    is_counted_once,
)
from megalowbit.optim.grad_scaler import GradScaler
from megalowbit.optim.optimizer_state import check_inner_state, check_masters, copy_masters, find_key

logger = logging.getLogger(__name__)

StepResult = tuple[bool, "float | None", "int | None"]
BeforeStep = Callable[[float], object]


def learning_rate(group: Mapping[str, Any]) -> float:
    """What a step multiplies a group's update by: `lr`, times `lr_scale` where the group has one."""
    return group["lr"] * group.get("lr_scale", 1.0)


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """What both optimizers share; a torch `Optimizer`, so that any learning-rate scheduler takes it.

    `param_groups` and `state` are those of the inner optimizer. A group may hold `lr_scale`, by which its
    learning rate is multiplied at each step; schedulers, which write `lr`, do not see it, and it is saved
    with the group. Attributes after a step: `found_inf`, `grad_norm` (unscaled, before clipping; None after a
    skip). `before_step` may be set at any time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        grad_scaler: GradScaler | None,
        model_parallel_group: dist.ProcessGroup | None,
        gradient_norm: GradientNorm,
        before_step: BeforeStep | None,
    ) -> None:
        if gradient_norm not in get_args(GradientNorm):
            raise unknown_name("gradient_norm", gradient_norm, get_args(GradientNorm))
        if not 0 <= clip_grad < float("inf"):
            raise UserError(
                f"clip_grad must be a finite number ≥ 0 (0 turns clipping off), not {clip_grad!r}"
            )
        self.optimizer = optimizer
        self.clip_grad = clip_grad
        self.log_num_zeros_in_grad = log_num_zeros_in_grad
        self.params_have_main_grad = params_have_main_grad
        self.grad_scaler = grad_scaler
        self.model_parallel_group = model_parallel_group
        self.gradient_norm = gradient_norm
        self.before_step = before_step
        self.found_inf = False
        self.grad_norm: float | None = None
        self.float16_groups: list[list[torch.nn.Parameter]] = []
        self.fp32_from_float16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.nn.Parameter]] = []
        for group in optimizer.param_groups:
            self._adopt_group(group)
        groups, state = optimizer.param_groups, optimizer.state
        super().__init__(groups, optimizer.defaults)  # for torch's step hooks; adds these very groups again
        self.state = state
        self._pairs = list(self._model_and_master())
        self._masters = {id(model): master for model, master in self._pairs}
        self._is_counted = [is_counted_once(model, model_parallel_group) for model, _ in self._pairs]
        self._is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self.grad_buffer = self._make_grad_buffer() if params_have_main_grad else None
        if gradient_norm == "sum_of_norms":
            self._check_same_parameters()

    # Property and not alias: loading a state gives the inner optimizer new objects.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner optimizer; their `params` are the fp32 masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the inner optimizer, keyed by master."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def loss_scale(self) -> float:
        """S by which the loss of the coming backward is multiplied; 1 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by S, in fp32: S itself may not exist in half precision."""
        return loss.float() * self.loss_scale

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """Apply the gathered gradients, or skip them if any is infinite or NaN.

        Collective over the model-parallel group. Gradients must already be averaged over data parallel.
        `before_step` is called first, with S: what it adds to the gradients is inspected, clipped and, where
        they overflow, dropped as they are.

        Returns:
            `(True, norm, num_zeros)`, or `(False, None, None)` after a skip, which leaves masters, moments
            and step counts as they were. `norm` is unscaled and before clipping; `num_zeros` is None unless
            asked for.
        """
        if closure is not None:
            raise TypeError("step takes no closure: call backward first")
        inv_scale = self.grad_scaler.inv_scale if self.grad_scaler is not None else 1.0
        if self.before_step is not None:
            self.before_step(self.loss_scale)
        self._give_masters_their_gradients()
        facts = self._inspect()
        if self.grad_scaler is not None:
            self.grad_scaler.update(facts.found_inf)
        self.found_inf = facts.found_inf
        self.grad_norm = None
        if not facts.found_inf:
            self.grad_norm = facts.norm * inv_scale
            self._step_masters(inv_scale * clip_coefficient(self.clip_grad, self.grad_norm))
            self._copy_masters_to_model()
        self.zero_grad()
        return not facts.found_inf, self.grad_norm, None if facts.found_inf else facts.num_zeros

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature
        """Clear the gradients of model, masters and buffer; they are always set to None."""
        for model, master in self._pairs:
            model.grad = None
            master.grad = None
        if self.grad_buffer is not None:
            self.grad_buffer.zero()
        elif self.params_have_main_grad:
            torch._foreach_zero_([model.main_grad for model, _ in self._pairs])

    def state_dict(self) -> dict[str, Any]:
        """`optimizer`, `grad_scaler` (if there is one) and `fp32_from_fp16_params` (masters by group)."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["fp32_from_fp16_params"] = [
            [master.detach() for master in group] for group in self.fp32_from_float16_groups
        ]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Continue from a saved state; model parameters are restored from the masters.

        Megatron's older keys `optimizer_state_dict` and `fp32_from_fp16` are understood. A state without
        scaler leaves the scaler at its initial value, with a warning.

        Args:
            state_dict: from `state_dict`.
            load_optimizer_states: False loads masters and scaler but no moments.

        Raises:
            UserError: keys, groups or shapes do not fit; nothing has been changed then.
        """
        inner = find_key(state_dict, ("optimizer", "optimizer_state_dict"))
        masters = find_key(
            state_dict,
            ("fp32_from_fp16_params", "fp32_from_fp16"),
            default=None if self._has_masters() else [],
        )
        if load_optimizer_states:
            check_inner_state(inner, self.optimizer)
        check_masters(masters, self.fp32_from_float16_groups)
        self._load_grad_scaler(state_dict.get("grad_scaler"))
        copy_masters(masters, self.fp32_from_float16_groups)
        if load_optimizer_states:
            self.optimizer.load_state_dict(inner)
        self._copy_masters_to_model()

    def reload_model_params(self) -> None:
        """Take the masters from the model, after something else has written to it; its rounding stays."""
        with torch.no_grad():
            for model, master in self._pairs:
                if master is not model:
                    master.copy_(model)

    def master_of(self, model_parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 tensor that a step updates: the parameter's master, or the parameter itself.

        Raises:
            UserError: this optimizer does not train the parameter.
        """
        master = self._masters.get(id(model_parameter))
        if master is None:
            raise UserError(
                f"a parameter of shape {tuple(model_parameter.shape)} is not trained by this optimizer: "
                "pass one of the model's parameters that it was built with"
            )
        return master

    def state_of(self, model_parameter: torch.Tensor) -> dict[str, Any]:
        """The inner optimizer's state of a parameter (moments, step): live, and empty before its first step.

        Raises:
            UserError: this optimizer does not train the parameter.
        """
        return self.state[self.master_of(model_parameter)]

    def masters_have_changed(self) -> None:
        """Copy the masters to the model, after something else has written to them."""
        self._copy_masters_to_model()

    def _adopt_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _load_grad_scaler(self, saved: Mapping[str, Any] | None) -> None:
        if self.grad_scaler is None:
            return
        if saved:
            self.grad_scaler.load_state_dict(saved)
        elif self.grad_scaler.state_dict():
            logger.warning("the state holds no grad scaler: continuing with loss scale %g", self.loss_scale)

    def _has_masters(self) -> bool:
        return any(self.fp32_from_float16_groups)

    def _model_and_master(self) -> Iterator[tuple[Any, Any]]:
        groups = zip(
            self.float16_groups, self.fp32_from_float16_groups, self.fp32_from_fp32_groups, strict=True
        )
        for halves, masters, fp32 in groups:
            yield from zip(halves, masters, strict=True)
            yield from ((parameter, parameter) for parameter in fp32)

    def _make_grad_buffer(self) -> GradBuffer | None:
        models = [model for model, _ in self._pairs]
        if models and all(hasattr(model, "main_grad") for model in models):
            return None  # someone else keeps the gradients, as Megatron's DDP does
        return GradBuffer(models)

    def _check_same_parameters(self) -> None:
        """Shards are matched by their place, and ranks of different lengths would wait for each other."""
        group = self.model_parallel_group
        if group is None or process_group.world_size(group) == 1:
            return
        counts: list[Any] = [None] * process_group.world_size(group)
        dist.all_gather_object(counts, len(self._pairs), group=group)
        if len(set(counts)) > 1:
            raise UserError(
                f'gradient_norm "sum_of_norms" needs the same parameters on all ranks of the model-parallel '
                f'group, which have {counts}: use "global"'
            )

    def _give_masters_their_gradients(self) -> None:
        for model, master in self._pairs:
            if self.params_have_main_grad:
                master.grad = model.main_grad
            elif master is not model:
                master.grad = None if model.grad is None else model.grad.float()
                model.grad = None

    def _inspect(self) -> GradientFacts:
        """The facts about the masters' gradients, by the norm that was asked for."""
        options: dict[str, Any] = {
            "count_zeros": self.log_num_zeros_in_grad,
            "group": self.model_parallel_group,
        }
        gradients = [master.grad for _, master in self._pairs]
        if self.gradient_norm == "sum_of_norms":
            return inspect_each_gradient(gradients, is_counted=self._is_counted, **options)
        if self.grad_buffer is not None and all(self._is_counted):
            return inspect_gradients([self.grad_buffer.flat], **options)
        with_grad = [
            (grad, is_counted)
            for grad, is_counted in zip(gradients, self._is_counted, strict=True)
            if grad is not None
        ]
        return inspect_gradients(
            [grad for grad, is_counted in with_grad if is_counted],
            uncounted=[grad for grad, is_counted in with_grad if not is_counted],
            **options,
        )

    def _step_masters(self, factor: float) -> None:
        """Inner step on gradients times `factor`."""
        with _scaled_learning_rates(self.param_groups):
            self._step_inner(factor)

    def _step_inner(self, factor: float) -> None:
        if factor == 1.0:
            self.optimizer.step()
            return
        gradients = [master.grad for _, master in self._pairs if master.grad is not None]
        if not self._is_fused or not gradients:
            if gradients:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
            return
        inner: Any = self.optimizer
        inner.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=gradients[0].device)
        try:
            self.optimizer.step()
        finally:
            del inner.grad_scale

    @torch.no_grad()
    def _copy_masters_to_model(self) -> None:
        halves = [(model, master) for model, master in self._pairs if master is not model]
        if halves:
            torch._foreach_copy_([model for model, _ in halves], [master for _, master in halves])


@contextmanager
def _scaled_learning_rates(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let every group's `lr` be what `learning_rate` says, for the inner optimizer's sake."""
    before = [(group, group["lr"]) for group in groups if "lr_scale" in group]
    try:
        for group, _ in before:
            group["lr"] = learning_rate(group)
        yield
    finally:
        for group, lr in before:
            group["lr"] = lr
