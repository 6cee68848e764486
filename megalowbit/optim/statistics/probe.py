"""Measures how much gradient half precision loses, by computing some weight gradients again in fp32.

A weight's gradient is (output gradient)ᵀ · input: (out, tokens) · (tokens, in). Both operands exist during
backward. On the steps that a strategy requests (`is_armed`), the product is computed again in fp32 and
compared with the layer's gradient of that micro-batch: sums of squares of both, and how many elements of the
first are zero in the second. When not armed, there are no hooks.

How to read the ratio: the reference starts from the layer's half-precision operands. It therefore shows what
the weight's gradient loses, not what was lost before. With low-bit layers the ratio also includes
quantisation noise and their loss of small elements: compare it with earlier values, or leave these layers
out. For all layers, an armed step keeps the input until backward, even if activation checkpointing would not.

Not covered: compiled models, in which hooks may not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError
from megalowbit.optim.statistics.amax import sampled_positions

Form = Literal["out_in", "in_out", "by_shape"]
Operands = tuple[Tensor, Tensor]  # (…, in) and (…, out)


class GradientProbe:
    """Compares weight gradients of linear layers with their recomputation in fp32.

    A layer is an `nn.Linear` or its subclass, a transformers `Conv1D` (weight as (in, out)), or any module
    that has a 2-D `weight` and at most a `bias`, and whose input and output have the weight's sizes. In the
    last case, square weights are left out, because their axes cannot be distinguished. Frozen weights, tied
    weights, and layers used more than once in a backward are left out too.

    Args:
        model: the model to probe.
        sample: share of the layers to probe, in (0, 1]; at least one.

    Attributes:
        names: the probed layers.

    Raises:
        UserError: no layer can be probed, or `sample` is out of range.
    """

    def __init__(self, model: nn.Module, *, sample: float = 1.0) -> None:
        found = _probed_layers(model)
        if not found:
            raise UserError(
                "no linear layer with a trained, unshared weight can be probed: choose a scale strategy "
                "that needs no norm ratio, such as max_value"
            )
        chosen = [found[position] for position in sampled_positions(len(found), sample)]
        self.names = [name for name, _, _ in chosen]
        self._layers = [(module, form) for _, module, form in chosen]
        self._pending: list[list[Operands]] = [[] for _ in chosen]
        self._hooks: list[Any] = []
        self._sums: dict[torch.device, Tensor] = {}
        self._is_armed = False

    @property
    def is_armed(self) -> bool:
        """Whether forward and backward passes are probed from now on; may be set between steps."""
        return self._is_armed

    @is_armed.setter
    def is_armed(self, value: bool) -> None:
        if value == self._is_armed:
            return
        self.detach()
        if value:
            for index, (module, form) in enumerate(self._layers):
                self._hooks.append(module.register_forward_hook(self._forward_hook(index)))
                # a tensor hook runs before accumulation: it gets this micro-batch's gradient only
                hook: Any = module.weight.register_hook(self._weight_hook(index, form))  # type: ignore[operator]
                self._hooks.append(hook)
            self._is_armed = True

    @torch.no_grad()
    def take(self, group: dist.ProcessGroup | None = None) -> Tensor | None:
        """Return and reset the sums since the last call, added over `group`; None: this process only.

        Returns:
            (5,) float64: Σ reference², Σ half², number of elements that are zero in half precision only,
            number of non-zero elements of the reference, number of compared elements; None if not armed. All
            0: no probed layer took part. Scaled gradients give sums times the square of the scale.
        """
        if not self._is_armed:
            return None
        device = self._layers[0][0].weight.device
        total = torch.zeros(5, dtype=torch.float64, device=device)  # type: ignore[arg-type]
        for sums in self._sums.values():
            total += sums.to(total.device)
        self._sums = {}
        for pending in self._pending:
            pending.clear()
        if group is not None and process_group.world_size(group) > 1:
            collectives.all_reduce(total, group=group)
        return total

    def detach(self) -> None:
        """Remove the hooks and reset the sums."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums, self._is_armed = [], {}, False
        for pending in self._pending:
            pending.clear()

    def _forward_hook(self, index: int) -> Callable[..., None]:
        def remember(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if not arguments or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor):
                return
            # no graph: evaluation, or the first of a checkpointed segment's two forwards
            if not output.requires_grad or not arguments[0].is_floating_point():
                return
            input, version = arguments[0].detach(), arguments[0]._version

            def keep(grad_output: Tensor) -> None:
                if input._version == version:  # otherwise overwritten, which low-bit layers allow
                    self._pending[index].append((input, grad_output.detach()))

            output.register_hook(keep)

        return remember

    def _weight_hook(self, index: int, form: Form) -> Callable[[Tensor], None]:
        def compare(gradient: Tensor) -> None:
            operands = self._pending[index]
            if len(operands) == 1:
                self._compare(gradient.detach(), *operands[0], form)
            operands.clear()

        return compare

    @torch.no_grad()
    def _compare(self, half: Tensor, input: Tensor, grad_output: Tensor, form: Form) -> None:
        is_in_out = _is_in_out(half, input, grad_output, form)
        if is_in_out is None or half.is_sparse:
            return
        with torch.autocast(half.device.type, enabled=False):
            left = grad_output.reshape(-1, grad_output.shape[-1]).float()
            reference = left.T @ input.reshape(-1, input.shape[-1]).float()  # (out, in)
        if is_in_out:
            reference = reference.T
        is_lost = (half == 0) & (reference != 0)
        figures = [
            torch.linalg.vector_norm(reference, dtype=torch.float64).square(),
            torch.linalg.vector_norm(half, dtype=torch.float64).square(),
            is_lost.sum(dtype=torch.float64),
            torch.count_nonzero(reference).double(),
            torch.full((), half.numel(), dtype=torch.float64, device=half.device),
        ]
        sums = torch.stack(figures)
        before = self._sums.get(sums.device)
        self._sums[sums.device] = sums if before is None else before + sums


def _probed_layers(model: nn.Module) -> list[tuple[str, nn.Module, Form]]:
    """Layers whose weight gradient is a single product, with the form of the weight."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or not weight.requires_grad or not weight.numel():
            continue
        form = _form_of(module, weight)
        if form is not None and owners[id(weight)] == 1:
            found.append((name, module, form))
    return found


def _form_of(module: nn.Module, weight: Tensor) -> Form | None:
    if isinstance(module, nn.Linear):
        return "out_in"
    # not imported, because transformers may be missing, and the class has moved between its versions
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == weight.shape[1]:
        return "in_out"
    is_plain = module._parameters.keys() <= {"weight", "bias"} and not any(module.children())
    is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return "by_shape" if is_plain and not is_lookup and weight.shape[0] != weight.shape[1] else None


def _is_in_out(weight: Tensor, input: Tensor, grad_output: Tensor, form: Form) -> bool | None:
    """Whether the weight is (in, out); None if the sizes are not those of a linear layer."""
    if not input.ndim or input.shape[:-1] != grad_output.shape[:-1]:
        return None
    sizes = (grad_output.shape[-1], input.shape[-1])
    if form != "in_out" and tuple(weight.shape) == sizes:
        return False
    return True if form != "out_in" and tuple(weight.shape) == sizes[::-1] else None
