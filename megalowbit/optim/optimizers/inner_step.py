"""Runs the inner torch optimizer's update, by the fastest path that its settings allow.

- "one_pass": Adam and AdamW on CPUs, with `kernels.cpu`. One pass over memory unscales, steps and writes the
  half weights. Bits and state are those of torch's fused Adam, so either can continue the other.
- "apex": the same on GPUs with NVIDIA's apex, if `MEGALOWBIT_APEX` is 1.
- "fused": torch's fused optimizers, then one copy of the masters to the half weights.
- "plain": any other optimizer. It cannot skip a step on the device, so the host reads the flag first. The
  other paths need no host read.

The path is chosen at each step, because settings, hooks and state may have changed. The fast paths are not
used if there are hooks, if `step` was replaced, or with `fused=False` or `foreach=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import SPARSE
from megalowbit.optim.kernels import apex as apex_kernels
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.kernels.cpu import AdamSettings, AdamTensors

StepPath = Literal["one_pass", "apex", "fused", "plain"]
ADAMS = (torch.optim.Adam, torch.optim.AdamW)  # exactly these classes: a subclass may step differently
FUSED = (*ADAMS, torch.optim.SGD, torch.optim.Adagrad)  # these support `grad_scale` and `found_inf`
UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")


def _own_gradient(master: Tensor) -> Tensor | None:
    return master.grad


class InnerStep:
    """Runs the update of `optimizer` on its fp32 masters and copies them to the half weights.

    Args:
        optimizer: its parameters are the masters.
        half_of: the fp16 or bf16 parameter of each master that has one.
        gradient_of: returns the scaled gradient of a master, fp32 or in its weight's dtype; None: the master
            is not updated. Default: the master's `.grad`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        half_of: Mapping[Tensor, Tensor],
        *,
        gradient_of: Callable[[Tensor], Tensor | None] = _own_gradient,
    ) -> None:
        self.optimizer = optimizer
        self._half_of = {id(master): half for master, half in half_of.items()}
        self._gradient_of = gradient_of
        self._lists = apex_kernels.TensorLists()

    @property
    def path(self) -> StepPath:
        """The path of the next step."""
        groups = self.optimizer.param_groups
        if type(self.optimizer) in ADAMS and not _is_observed(self.optimizer) and all(map(_is_usual, groups)):
            masters = [master for group in groups for master in group["params"]]
            if all(map(self._fits_one_pass, masters)) and cpu_kernels.is_available():
                return "one_pass"
            if masters and all(map(self._fits_apex, masters)):
                return "apex"
        return "fused" if isinstance(self.optimizer, FUSED) and all(map(_is_fused, groups)) else "plain"

    @property
    def can_defer_host_read(self) -> bool:
        """Whether `run` may be called before the host knows if the gradients overflowed."""
        return self.path != "plain"

    @torch.no_grad()
    def run(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        learning_rates: Sequence[float] | None = None,
        *,
        clears_gradients: bool = False,
    ) -> bool:
        """Step the masters on gradients ÷ `grad_scale`, then round them to the half weights.

        If `found_inf` is 1, masters, state and step counts do not change. The gradients cannot be used
        afterwards, because they may have been unscaled in place. Masters without gradient are not updated,
        nor are their half weights.

        Args:
            grad_scale: 0-dim fp32 on the masters' device; None: 1.
            found_inf: 0-dim fp32, exactly 0 or 1, on that device; None: 0. The "plain" path reads it.
            learning_rates: one for each group, instead of its `lr`.
            clears_gradients: set the gradients to zero, if that needs no separate pass.

        Returns:
            Whether all gradients are zero now, unless `found_inf` is 1; otherwise the caller clears them.

        Raises:
            UserError: a gradient is sparse, or has another shape than its master.
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups] if learning_rates is None else list(learning_rates)
        assert len(rates) == len(groups), (len(rates), len(groups))
        gradients = {
            id(master): self._dense_gradient(master) for group in groups for master in group["params"]
        }
        path = self.path
        if path in ("one_pass", "apex"):
            is_clearing = clears_gradients and path == "one_pass"
            return self._run_adam(path, gradients, grad_scale, found_inf, rates, is_clearing=is_clearing)
        with stepping_at(groups, rates):
            self._run_torch(path, gradients, grad_scale, found_inf)
        return False

    def _dense_gradient(self, master: Tensor) -> Tensor | None:
        gradient = self._gradient_of(master)
        if gradient is not None and gradient.layout != torch.strided:
            raise UserError(SPARSE)
        return gradient

    def _fits_one_pass(self, master: Tensor) -> bool:
        half = self._half_of.get(id(master))
        is_half = half is None or (half.dtype != torch.float32 and cpu_kernels.supports(half))
        return is_half and master.dtype == torch.float32 and cpu_kernels.supports(master)

    def _fits_apex(self, master: Tensor) -> bool:
        half = self._half_of.get(id(master))
        is_plain = half is None or half.is_contiguous()
        is_fp32 = master.dtype == torch.float32 and master.is_contiguous()
        return is_plain and is_fp32 and apex_kernels.is_available(master.device)

    def _run_adam(
        self,
        path: StepPath,
        gradients: Mapping[int, Tensor | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        rates: Sequence[float],
        *,
        is_clearing: bool,
    ) -> bool:
        """Returns whether all gradients are zero after a step that was taken."""
        items = []
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            settings = _settings_of(group, rate)
            for master in group["params"]:
                gradient = gradients[id(master)]
                if gradient is not None:
                    items.append(self._item(master, gradient, settings))
        if items:
            device = items[0].master.device
            scale = torch.ones((), device=device) if grad_scale is None else grad_scale
            flag = torch.zeros((), device=device) if found_inf is None else found_inf
            if path == "one_pass":
                cpu_kernels.adam_step(items, scale, flag, clears_gradients=is_clearing)
            else:
                apex_kernels.adam_step(self._lists.of(items), scale, flag)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise torch's schedulers warn
        # not zeroed: half-precision gradients, and gradients of which a contiguous copy was used
        places = {item.gradient.data_ptr() for item in items if item.gradient.dtype == torch.float32}
        given = (gradient for gradient in gradients.values() if gradient is not None)
        return is_clearing and all(gradient.data_ptr() in places for gradient in given)

    def _item(self, master: Tensor, gradient: Tensor, settings: AdamSettings) -> AdamTensors:
        """The tensors of one master's step; its state is created at the first step, as torch creates it."""
        state = self.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        if state["step"].dtype != torch.float32 or state["step"].device != master.device:
            # the previous steps were not fused, and torch then uses another dtype or device for it
            state["step"] = state["step"].to(master.device, torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].contiguous()  # a loaded state may have other strides
        return AdamTensors(
            master=master,
            gradient=gradient.resolve_neg().contiguous(),
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            step=state["step"],
            half=self._half_of.get(id(master)),
            settings=settings,
        )

    def _run_torch(
        self,
        path: StepPath,
        gradients: Mapping[int, Tensor | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if path == "plain" and found_inf is not None and found_inf.item():
            return
        inner: Any = self.optimizer
        with _gradients_in_place(inner, gradients) as used:
            if path == "fused":
                _align_state(inner, used)
            if path == "plain":
                if grad_scale is not None and used:
                    torch._foreach_div_([master.grad for master in used], grad_scale)  # type: ignore[misc]
                inner.step()
            else:
                _start_momentum(inner)
                inner.grad_scale, inner.found_inf = grad_scale, found_inf
                try:
                    inner.step()
                finally:
                    del inner.grad_scale, inner.found_inf
        pairs = [(self._half_of[id(master)], master) for master in used if id(master) in self._half_of]
        if pairs:
            halves, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(halves, masters)


def _settings_of(group: Mapping[str, Any], rate: float) -> AdamSettings:
    beta1, beta2 = group["betas"]
    return AdamSettings(
        learning_rate=rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=group["eps"],
        weight_decay=group["weight_decay"],
        is_decoupled=group["decoupled_weight_decay"],
    )


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Whether a group of Adam uses only options that the kernels support."""
    numbers = (group["lr"], *group["betas"])
    is_left_open = group.get("fused") is not False and not any(group.get(name) for name in UNUSUAL)
    return is_left_open and not any(isinstance(number, Tensor) for number in numbers)


def _is_fused(group: Mapping[str, Any]) -> bool:
    """Whether torch's step supports the flag; a damped first momentum would not survive a skipped step."""
    return bool(group.get("fused")) and not (group.get("momentum") and group.get("dampening"))


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a replaced `step` expect `step` to be called."""
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return True
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    )


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start SGD's momentum from zeros: a skipped first step would leave torch's buffer uninitialised."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for master in group["params"] if group["momentum"] else ():
            if master.grad is not None and optimizer.state[master].get("momentum_buffer") is None:
                optimizer.state[master]["momentum_buffer"] = torch.zeros_like(master)


def _align_state(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
    """Give moments their master's strides: it may have got others since, by `channels_last` or a load."""
    for master in masters:
        state = optimizer.state.get(master, {})
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == master.shape
                and value.stride() != master.stride()
            ):
                state[key] = torch.empty_like(master, dtype=value.dtype).copy_(value)


@contextmanager
def _gradients_in_place(
    optimizer: torch.optim.Optimizer, gradients: Mapping[int, Tensor | None]
) -> Iterator[list[Tensor]]:
    """Temporarily set the masters' `.grad` to their gradients; yields the masters that have one.

    A gradient is fp32 and has its master's strides, because torch's fused kernels read memory in its order.
    """
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    before = [master.grad for master in masters]
    used, others, copies = [], [], []
    for master in masters:
        gradient = gradients[id(master)]
        if gradient is not None:
            used.append(master)
            if gradient.dtype != master.dtype or gradient.stride() != master.stride():
                others.append(gradient)
                copies.append(gradient := torch.empty_like(master))
        master.grad = gradient
    if others:
        torch._foreach_copy_(copies, others)
    try:
        yield used
    finally:
        for master, gradient in zip(masters, before, strict=True):
            master.grad = gradient


@contextmanager
def stepping_at(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> Iterator[None]:
    """Temporarily set the groups' learning rates; schedulers still see `lr`."""
    before = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate
