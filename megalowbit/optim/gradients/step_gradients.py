"""The gradients of one step: where they are stored, their statistics, and how they are cleared.

They are `main_grad`s in a `GradBuffer`, `main_grad`s kept by other code, or `.grad`s, mostly in half
precision. Buffers are looked up at each use, because a data-parallel wrapper may replace them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.gradients.locate_overflow import RankOverflow, joined, locate_overflow
from megalowbit.optim.gradients.norm import GradientNorm, Measurement, is_counted_once, measure_gradients
from megalowbit.optim.gradients.report import Overflow
from megalowbit.optim.statistics.layer_scaling import LayerScaling


class StepGradients:
    """Gradients of the parameters that one optimizer trains.

    Args:
        pairs: each model parameter and its master, which may be the same tensor.
        names: names of the model parameters, by id.
        has_main_grad: the gradients are in `main_grad`, else in `.grad`.
        copies: ranks that hold copies of parameters which are not sharded; the first one counts these.
        layer_scaling: its factors must be divided out of `main_grad`.

    Attributes:
        later_stages: number of pipeline stages that run their backward before this rank's.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        names: Mapping[int, str],
        has_main_grad: bool,
        copies: dist.ProcessGroup | None,
        layer_scaling: LayerScaling | None,
    ) -> None:
        self._pairs, self._names = pairs, names
        self._models = [model for model, _ in pairs]
        self._has_main_grad = has_main_grad
        self._layer_scaling = layer_scaling
        self.later_stages = 0
        self._is_counted = [is_counted_once(model, copies) for model in self._models]

    def named(self) -> Iterator[tuple[str, Any]]:
        """Each model parameter with its name."""
        return ((self._names[id(model)], model) for model in self._models)

    def of(self, model: Any) -> torch.Tensor | None:
        """The scaled gradient of a model parameter, fp32 or in the parameter's dtype; None if it has none."""
        return model.main_grad if self._has_main_grad else model.grad

    def to_apply(self, model: Any) -> torch.Tensor | None:
        """The gradient that a step applies: None too for a parameter that was frozen before its gradient.

        As in torch, such a parameter is left alone, and one that is frozen after its backward is not. If
        other code keeps the `main_grad`s, without `.grad`s, both are left alone.
        """
        if self._has_main_grad and not model.requires_grad and model.grad is None:
            return None
        return self.of(model)

    def collect(self) -> None:
        """Apply changes made to `.grad` since backward, if a `GradBuffer` keeps the sums.

        Raises:
            UserError: a `.grad` does not fit its parameter.
        """
        for buffer in self._buffers():
            buffer.collect(self._names)

    def exist(self) -> bool:
        """Whether there is any gradient since the last step, from a backward or set by hand."""
        self.collect()
        if any(buffer.has_gradients() for buffer in self._buffers()):
            return True
        others = (self.of(model) for model in self._others())
        return any(gradient is not None and bool(gradient.any()) for gradient in others)

    def measure(self, kind: GradientNorm, **options: Any) -> Measurement:
        """Measure all of them; `options` are those of `measure_gradients`."""
        gradients = [self.to_apply(model) for model in self._models]
        return measure_gradients(gradients, is_counted=self._is_counted, kind=kind, **options)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply all of them by a number, 0-dim."""
        for gradient in map(self.of, self._models):
            if gradient is not None:
                gradient.mul_(factor.to(gradient.device))

    def zero(self) -> None:
        """Clear them: `.grad`s of models and masters become None, `main_grad`s zero; see `GradBuffer`."""
        for model, master in self._pairs:
            model.grad = None
            master.grad = None
        if not self._has_main_grad:
            return
        for buffer in self._buffers():
            buffer.zero(self._models_in(buffer))
        others = [model.main_grad for model in self._others()]
        if others:
            torch._foreach_zero_(others)

    def release_held(self) -> None:
        """Call this before an update that clears `main_grad`s: see `GradBuffer.release_held`."""
        for buffer in self._buffers():
            buffer.release_held(self._models_in(buffer))

    def mark_zeroed(self) -> None:
        """Call this after an update that has cleared all `main_grad`s that it applied, while reading them."""
        if not self._has_main_grad:
            return
        not_applied = [model.main_grad for model in self._models if self.to_apply(model) is None]
        if not_applied:
            torch._foreach_zero_(not_applied)
        for buffer in self._buffers():
            buffer.mark_zeroed(self._models_in(buffer))

    def local_overflow(self, *, is_before: bool) -> RankOverflow:
        """The non-finite gradients of this rank, in the order of backward; reads the device.

        Args:
            is_before: if this package averaged the gradients, check them as they were before that.
        """
        trained, buffers = {id(model) for model in self._models}, self._buffers()
        found = [
            each for one in buffers for each in one.overflowed(is_before=is_before) if id(each[1]) in trained
        ]
        # the reverse order of parameters is roughly the order of backward
        for place, model in enumerate(reversed(self._others())):
            gradient = self.of(model)
            if gradient is not None and not torch.isfinite(gradient).all():
                found.append((place, model))
        return RankOverflow(
            rank=process_group.rank(),
            tensors=[(place, self._names[id(model)]) for place, model in found],
            num_gradients=len(self._models),
            is_own=is_before and bool(buffers) and all(buffer.is_reduced for buffer in buffers),
            later_stages=self.later_stages,
        )

    def check_factors(self) -> None:
        """Check that layer scaling's factors have been divided out.

        Raises:
            UserError: some gradients are kept by code that does not divide by the factors.
        """
        if self._layer_scaling is None:
            return
        factor_of = self._layer_scaling.factor_of
        if self._others() or any(buffer.factor_of != factor_of for buffer in self._buffers()):
            raise UserError(
                "layer scaling: main_grads are kept by code that does not divide by its factors; pass "
                "the same instruments to LocalDDP and to the optimizer"
            )

    def _buffers(self) -> list[GradBuffer]:
        if not self._has_main_grad:
            return []
        buffers = [getattr(model, "grad_buffer", None) for model in self._models]
        return list({id(buffer): buffer for buffer in buffers if buffer is not None}.values())

    def _models_in(self, buffer: GradBuffer) -> list[Any]:
        return [model for model in self._models if getattr(model, "grad_buffer", None) is buffer]

    def _others(self) -> list[Any]:
        """Parameters whose gradients are in no buffer of this package."""
        return [m for m in self._models if not self._has_main_grad or not hasattr(m, "grad_buffer")]


def locate(each: Sequence[StepGradients], group: dist.ProcessGroup | None) -> Overflow | None:
    """Locate an overflow before averaging, or else in the current gradients; collective over `group`.

    `each` are the gradients of the optimizers that step together. Without a group, this process is the only
    one.
    """
    for is_before in (True, False):
        seen = [gradients.local_overflow(is_before=is_before) for gradients in each]
        found = locate_overflow(joined(seen), group)
        if found is not None:
            return found
    return None
