"""fp32 gradients of half-precision parameters, in one contiguous buffer.

Each parameter gets `main_grad`, a view into the buffer; a hook adds `.grad` to it as soon as backward has
made one and drops `.grad`, so micro-batches add up in fp32 and the half-precision gradients never exist all
at once. The views stand in reverse order of the parameters, roughly the order in which backward fills them,
as in Megatron's local DDP. One buffer also means one all-reduce without copies.

Nothing is cleared between steps: after `forget` the first gradient overwrites what is there, and `settle`
zeroes what got none. Each view has a version counter of its own, so what others write to a `main_grad` is
told from what is left of the last step. On CPUs one pass adds a gradient up and takes its sum of squares.
Not covered: overlap of communication with backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megalowbit import process_group
from megalowbit.errors import UserError
from megalowbit.optim import cpu_kernels


class GradBuffer:
    """One fp32 buffer and the `main_grad` views of `parameters` in it.

    A parameter that occurs twice (tied weights) has one view; one that gets no gradient has zeros once the
    buffer is settled. Make it only when the parameters have their final dtype and device: the hooks hold on
    to both.

    Args:
        parameters: floating-point parameters, all on one device.
        factor_of: by what a parameter's gradients were multiplied beyond the loss scale; divided out here.

    Attributes:
        flat: (elements,) fp32, what has to be all-reduced, after `settle`.
        parameters: each once, in the order given.
        arrivals: indices of parameters, in the order in which the latest backward brought their gradients.

    Raises:
        UserError: the parameters lie on several devices.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        factor_of: Callable[[torch.nn.Parameter], float] | None = None,
    ) -> None:
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        devices = {parameter.device for parameter in unique}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UserError(f"parameters lie on several devices ({names}): move the model to one of them")
        elements = sum(parameter.numel() for parameter in unique)
        self.parameters = unique
        self.arrivals: dict[int, None] = {}  # a set that keeps its order
        self.flat = torch.zeros(elements, dtype=torch.float32, device=devices.pop() if devices else None)
        self._factor_of = factor_of
        self._views = self._make_views()
        self._is_stale = [False] * len(unique)
        self._versions = [0] * len(unique)
        self._flat_version = 0
        self._squares: torch.Tensor | None = None
        if self.flat.device.type == "cpu" and cpu_kernels.is_available():
            self._squares = torch.zeros(len(unique), dtype=torch.float64)
        self._before_reduction: torch.Tensor | None = None
        self._index_of = {id(parameter): index for index, parameter in enumerate(unique)}
        self._note_versions()
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))
            for index, parameter in enumerate(unique)
        ]

    def settle(self) -> torch.Tensor:
        """Zero what got no gradient since `forget`; to be called before anything reads the buffer.

        Returns:
            `flat`.
        """
        for index, view in enumerate(self._views):
            if not self._is_leftover(index):
                continue
            view.zero_()
            self._versions[index] = view._version
            if self._squares is not None:
                self._squares[index] = 0.0
        self._is_stale = [False] * len(self.parameters)
        return self.flat

    def squares(self) -> torch.Tensor | None:
        """Sum of squares of each `main_grad`, (parameters,) float64, if known without another pass.

        They were taken as the gradients came in; None where anything has written to the buffer since, or
        could have: a collective moves no version counter, so with several ranks they are not known.
        """
        is_alone = process_group.world_size() == 1
        return self._squares_as_gathered() if is_alone and not self.is_reduced else None

    def before_reduction(self) -> torch.Tensor:
        """`settle` for gradients that will now be averaged over ranks; remembers which were not finite here.

        Returns:
            `flat`.
        """
        flat = self.settle()
        squares = self._squares_as_gathered()
        self._before_reduction = self._squares_now() if squares is None else squares.clone()
        return flat

    def overflowed(self) -> list[tuple[int, torch.nn.Parameter]]:
        """Parameters whose gradient is infinite or NaN, each with its place in the order of backward.

        Where gradients have been averaged since, those that were so on this rank before. Reads the device.
        """
        squares = self._squares_now() if self._before_reduction is None else self._before_reduction
        is_finite = torch.isfinite(squares).tolist()
        order = [*self.arrivals, *(index for index in range(len(is_finite)) if index not in self.arrivals)]
        return [(place, self.parameters[index]) for place, index in enumerate(order) if not is_finite[index]]

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient that is not zero has come in since `forget` or `zero`. Reads the device."""
        index = self._index(parameter)
        return not self._is_leftover(index) and bool(self._views[index].any())

    @property
    def is_reduced(self) -> bool:
        """Whether `before_reduction` has been called for the present gradients."""
        return self._before_reduction is not None

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Let the next gradients overwrite these; costs nothing. Drops gradients not yet added.

        Args:
            parameters: whose gradients are spent; None: all.
        """
        indices = range(len(self.parameters)) if parameters is None else map(self._index, parameters)
        for index in indices:
            self.parameters[index].grad = None
            self._is_stale[index] = True
            self._versions[index] = self._views[index]._version
        self._flat_version = self.flat._version
        self._before_reduction = None

    def zero(self) -> None:
        """Forget all gradients, also those not yet added, and leave zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        self.flat.zero_()
        self._is_stale = [False] * len(self.parameters)
        self._note_versions()
        self._before_reduction = None
        if self._squares is not None:
            self._squares.zero_()

    def detach(self) -> None:
        """Remove the hooks and the views; the parameters get ordinary gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in self.parameters:
            for name in ("main_grad", "grad_buffer"):
                if hasattr(parameter, name):
                    delattr(parameter, name)

    def _make_views(self) -> list[torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        offset = 0
        for parameter in reversed(self.parameters):
            # .data: a version counter of its own, see `settle`
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape).data
            parameter.main_grad = view  # type: ignore[attr-defined]  # Megatron's name for it
            parameter.grad_buffer = self  # type: ignore[attr-defined]  # so that an optimizer finds it
            views[id(parameter)] = view
            offset += parameter.numel()
        return [views[id(parameter)] for parameter in self.parameters]

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def accumulate(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return
            if parameter.grad.is_sparse:
                raise UserError("sparse gradients are not supported: build embeddings with sparse=False")
            self._accumulate(index, parameter.grad)
            parameter.grad = None

        return accumulate

    @torch.no_grad()
    def _accumulate(self, index: int, gradient: torch.Tensor) -> None:
        view, parameter = self._views[index], self.parameters[index]
        is_first = self._is_leftover(index)
        factor = 1.0 if self._factor_of is None else 1.0 / self._factor_of(parameter)
        self._is_stale[index] = False
        self.arrivals.pop(index, None)
        self.arrivals[index] = None
        if self._squares is not None and cpu_kernels.can_accumulate(view, gradient):
            cpu_kernels.accumulate(view, gradient, factor, is_first, self._squares[index])
            self._versions[index] = view._version
        elif is_first:
            torch.mul(gradient.to(view.dtype), factor, out=view)
        else:
            view.add_(gradient, alpha=factor)

    def _is_leftover(self, index: int) -> bool:
        """Whether a `main_grad` holds what the last step has used, and nobody has written to it since."""
        is_untouched = self._views[index]._version == self._versions[index]
        return self._is_stale[index] and is_untouched and self.flat._version == self._flat_version

    def _note_versions(self) -> None:
        self._versions = [view._version for view in self._views]
        self._flat_version = self.flat._version

    def _index(self, parameter: torch.Tensor) -> int:
        return self._index_of[id(parameter)]

    def _squares_as_gathered(self) -> torch.Tensor | None:
        is_untouched = self.flat._version == self._flat_version and all(
            view._version == version for view, version in zip(self._views, self._versions, strict=True)
        )
        return self._squares if is_untouched else None

    def _squares_now(self) -> torch.Tensor:
        """Sums of squares of the views as they are, (parameters,)."""
        if self._squares is not None:
            return cpu_kernels.sums_of_squares(self._views)
        norms = torch._foreach_norm(self._views) if self._views else [self.flat.new_zeros(())]
        return torch.stack(list(norms)).double() ** 2
