"""fp32 gradients of half-precision parameters, in one contiguous buffer.

Each parameter gets `main_grad`, a view into the buffer; a hook adds `.grad` to it as soon as backward has
made one and drops `.grad`, so micro-batches add up in fp32 and the half-precision gradients never exist all
at once. The views stand in reverse order of the parameters, roughly the order in which backward fills them,
as in Megatron's local DDP. One buffer also means one all-reduce without copies.
Not covered: overlap of communication with backward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megalowbit.errors import UserError


class GradBuffer:
    """One fp32 buffer and the `main_grad` views of `parameters` in it.

    A parameter that occurs twice (tied weights) has one view; one that gets no gradient keeps zeros. Make it
    only when the parameters have their final dtype and device: the hooks hold on to both.

    Args:
        parameters: floating-point parameters, all on one device.

    Attributes:
        flat: (elements,) fp32, what has to be all-reduced.

    Raises:
        UserError: the parameters lie on several devices.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        devices = {parameter.device for parameter in unique}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UserError(f"parameters lie on several devices ({names}): move the model to one of them")
        elements = sum(parameter.numel() for parameter in unique)
        self.parameters = unique
        self.flat = torch.zeros(elements, dtype=torch.float32, device=devices.pop() if devices else None)
        offset = 0
        for parameter in reversed(unique):
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.main_grad = view  # type: ignore[attr-defined]  # Megatron's name for it
            offset += parameter.numel()
        self._hooks = [parameter.register_post_accumulate_grad_hook(_accumulate) for parameter in unique]

    def zero(self) -> None:
        """Forget all gradients, also those not yet added."""
        self.flat.zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def detach(self) -> None:
        """Remove the hooks and the views; the parameters get ordinary gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in self.parameters:
            if hasattr(parameter, "main_grad"):
                del parameter.main_grad


@torch.no_grad()
def _accumulate(parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        return
    if parameter.grad.is_sparse:
        raise UserError("sparse gradients are not supported: build embeddings with sparse=False")
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
