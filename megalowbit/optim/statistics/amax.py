"""The largest half-precision gradient of a step, found as backward makes it.

Scale strategies want to know how close gradients came to overflow in the form in which they can overflow:
scaled and in half precision, each micro-batch for itself. After accumulation in fp32 that is gone, so a hook
looks at each gradient the moment it is there and keeps the maxima in one tensor on the device. Nothing is
read by the host, and ranks talk once a step, a few bytes.

The sample spreads over the parameters by the golden ratio and not by a stride, which would meet the same
layer of each block again and again. Not covered: gradients of activations, which may overflow first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import process_group
from megalowbit.errors import UserError

_GOLDEN = (math.sqrt(5) - 1) / 2


def sampled_positions(count: int, sample: float) -> list[int]:
    """Which of `count` things to look at: a share of about `sample`, evenly spread, never none.

    The same for the same arguments, so all ranks look at the same.

    Raises:
        UserError: `sample` is not in (0, 1].
    """
    if not 0 < sample <= 1:
        raise UserError(f"sample = {sample!r} is not valid: it must be in (0, 1], 1 looks at everything")
    return [position for position in range(count) if (position * _GOLDEN) % 1 < sample]


class GradientWatch:
    """Keeps the largest |gradient| of each group of parameters until it is taken.

    Make it before anything that takes `.grad` away as soon as it is there (`GradBuffer`): hooks run in the
    order in which they were registered. Where `.grad` is gone already, it looks at `main_grad`. Frozen and
    empty parameters are left out, tied ones watched once. A process that trains nothing, as one of frozen
    blocks, sees nothing and takes part in `take` all the same.

    Args:
        named_parameters: as from `model.named_parameters()`, in the same order on all ranks.
        sample: share of the parameters to look at, in (0, 1]; of each group at least one.
        group_of: the group of a parameter, 0 … num_groups-1; None: all are in group 0.
        num_groups: how many groups there are.

    Raises:
        UserError: `sample` is out of range.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        sample: float = 1.0,
        group_of: Callable[[torch.nn.Parameter], int] | None = None,
        num_groups: int = 1,
    ) -> None:
        trained = {id(p): (name, p) for name, p in named_parameters if p.requires_grad and p.numel()}
        self.num_groups = num_groups
        self.names: list[str] = []
        self._maxima: dict[torch.device, Tensor] = {}
        self._hooks: list[Any] = []
        candidates = list(trained.values())
        groups = [0 if group_of is None else group_of(parameter) for _, parameter in candidates]
        for position in _of_every_group(groups, sampled_positions(len(candidates), sample)):
            name, parameter = candidates[position]
            self.names.append(name)
            hook = parameter.register_post_accumulate_grad_hook(self._hook_of(groups[position]))
            self._hooks.append(hook)
        self._first = candidates[0][1] if candidates else None  # a parameter may be moved later

    @torch.no_grad()
    def take(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """The maxima since the last time, which are forgotten. Collective over `group`.

        Returns:
            (num_groups,) float32 on the parameters' device, without parameters on one that `group` can
            exchange, times whatever the gradients were multiplied by; over all ranks of `group`;
            0 where nothing was seen, inf where a gradient was infinite or NaN.
        """
        device = process_group.exchange_device(group) if self._first is None else self._first.device
        taken = torch.zeros(self.num_groups, device=device)
        for maxima in self._maxima.values():
            taken = torch.maximum(taken, maxima.to(device))
            maxima.zero_()
        taken.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # reductions need not keep a NaN
        if group is not None and process_group.world_size(group) > 1:
            dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
        return taken

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook_of(self, index: int) -> Callable[[torch.nn.Parameter], None]:
        def look(parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad
            if gradient is None:
                gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                return
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if gradient.numel():
                self._keep(index, gradient)

        return look

    @torch.no_grad()
    def _keep(self, index: int, gradient: Tensor) -> None:
        maxima = self._maxima.get(gradient.device)
        if maxima is None:
            maxima = self._maxima[gradient.device] = torch.zeros(self.num_groups, device=gradient.device)
        # a tenth of the time of an inf-norm on CPUs; keeps a NaN, as maximum does
        lowest, highest = torch.aminmax(gradient)
        largest = torch.maximum(highest, -lowest).float()
        torch.maximum(maxima[index], largest, out=maxima[index])


def _of_every_group(groups: list[int], positions: list[int]) -> list[int]:
    """`positions`, and the first of each group that has none among them."""
    missing = set(groups) - {groups[position] for position in positions}
    return sorted({*positions, *(groups.index(group) for group in missing)})
