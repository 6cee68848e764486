"""The largest half-precision gradient of a step, measured during backward.

Scale strategies need to know how close gradients came to overflow in the form in which they can overflow:
scaled, in half precision, and separately for each micro-batch. After accumulation in fp32 this information is
lost, so a hook measures each gradient as soon as it is computed, and keeps the maxima in one tensor on the
device. The host reads nothing, and ranks exchange a few bytes once a step.

Samples are distributed over the parameters by the golden ratio. A fixed stride could select the same layer of
each block every time. Not covered: gradients of activations, which may overflow first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError

_GOLDEN = (math.sqrt(5) - 1) / 2


def sampled_positions(count: int, sample: float) -> list[int]:
    """Indices of a sample of `count` items: a share of about `sample`, evenly distributed, at least one.

    The result depends on the arguments only, so all ranks get the same sample.

    Raises:
        UserError: `sample` is not in (0, 1].
    """
    if not 0 < sample <= 1:
        raise UserError(f"sample = {sample!r} is not valid: it must be in (0, 1], where 1 samples everything")
    return [position for position in range(count) if (position * _GOLDEN) % 1 < sample]


class GradientWatch:
    """Keeps the largest |gradient| of each group of parameters until it is taken.

    Create it before anything that removes `.grad` during backward (`GradBuffer`), because hooks run in the
    order of registration. If `.grad` is already gone, it measures `main_grad`. Frozen and empty parameters
    are left out, tied ones are measured once. A process that trains nothing, such as one with frozen blocks,
    measures nothing but still takes part in `take`.

    Args:
        named_parameters: as from `model.named_parameters()`, in the same order on all ranks.
        sample: share of the parameters to measure, in (0, 1]; at least one of each group.
        group_of: the group of a parameter, 0 … num_groups-1; None: all are in group 0.
        num_groups: number of groups.

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
        self._first = candidates[0][1] if candidates else None  # for its device, which may change

    @torch.no_grad()
    def take(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return and reset the maxima since the last call. Collective over `group`.

        Returns:
            (num_groups,) float32 maxima over all ranks of `group`, multiplied by the loss scale and any other
            factor of the gradients. 0 if no gradient was measured, inf if a gradient was infinite or NaN. On
            the parameters' device, or without parameters on one that `group` can exchange.
        """
        device = process_group.exchange_device(group) if self._first is None else self._first.device
        taken = torch.zeros(self.num_groups, device=device)
        for maxima in self._maxima.values():
            taken = torch.maximum(taken, maxima.to(device))
            maxima.zero_()
        taken.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # reductions need not keep a NaN
        if group is not None and process_group.world_size(group) > 1:
            collectives.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
        return taken

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook_of(self, index: int) -> Callable[[torch.nn.Parameter], None]:
        def measure(parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad
            if gradient is None:
                gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                return
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if gradient.numel():
                self._keep(index, gradient)

        return measure

    @torch.no_grad()
    def _keep(self, index: int, gradient: Tensor) -> None:
        maxima = self._maxima.get(gradient.device)
        if maxima is None:
            maxima = self._maxima[gradient.device] = torch.zeros(self.num_groups, device=gradient.device)
        # takes a tenth of the time of an inf-norm on CPUs; NaN is kept, as by maximum
        lowest, highest = torch.aminmax(gradient)
        largest = torch.maximum(highest, -lowest).float()
        torch.maximum(maxima[index], largest, out=maxima[index])


def _of_every_group(groups: list[int], positions: list[int]) -> list[int]:
    """`positions`, plus the first of each group that is not among them."""
    missing = set(groups) - {groups[position] for position in positions}
    return sorted({*positions, *(groups.index(group) for group in missing)})
