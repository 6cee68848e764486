"""fp32 gradients of half-precision parameters, in one contiguous buffer.

Each parameter gets `main_grad`, a view into the buffer. As soon as backward has computed a half-precision
gradient, a hook adds it to `main_grad` and frees it. So micro-batches are summed in fp32, and half-precision
gradients never all exist at the same time. The views are in reverse order of the parameters, roughly the
order in which backward fills them, like in Megatron's local DDP. One buffer also allows one all-reduce
without copies.

After a backward, `.grad` is the same memory as `main_grad`, in fp32 also on a half-precision parameter
(`grad_dtype`). Changes to `.grad` therefore count as in torch: setting it to None, as `module.zero_grad()`
does, clears the gradient, assigning a tensor replaces it, and changes in place change it. The buffer checks
`.grad` before it adds the next gradient, before a reduction and before a step. `main_grad` may be written at
any other time. Between steps the buffer contains zeros. A `.grad` that other code still holds when it is
cleared keeps its values, as in torch; views of it do not.

A CUDA graph adds gradients without the host's knowledge: if `.grad` was set to None, the host cannot tell
whether a replay has added to the sum since. So a parameter to which a capture has added keeps its alias as
`.grad` when the buffer is cleared, and another tensor or None there is an error.

A low-bit layer adds its weight's gradient to `main_grad` itself (`add_gradient`), with the GEMM that computes
it, so there is no half-precision gradient. If something has to see one (a hook on the parameter,
`torch.autograd.grad`, anomaly detection), the layer returns it to autograd as usual.

Not covered: overlap of communication with backward; compiled autograd beyond the first micro-batch; backward
passes of several threads at once, whose sums may be wrong; hooks on the node that accumulates a weight's
gradient, which PyTorch does not list. They run, but get None in place of a gradient that a layer has added
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from megalowbit import cuda_graphs
from megalowbit.cuda_graphs import capture_of
from megalowbit.errors import UserError
from megalowbit.optim.kernels import cpu as cpu_kernels

FactorOf = Callable[[torch.nn.Parameter], float]
UNHELD = 2  # `sys.getrefcount` of an alias that only the buffer holds: of its tuple, and of the call
SPARSE = "sparse gradients are not supported: build embeddings with sparse=False"
HAS_GRAPH = (
    "backward(create_graph=True) would lose the graph of gradients that are summed in main_grad: use "
    "torch.autograd.grad"
)


class GradBuffer:
    """One fp32 buffer and the `main_grad` views of `parameters` in it.

    A parameter that occurs twice (tied weights) has one view. One that gets no gradient keeps zeros, and None
    as `.grad`. Create the buffer when the parameters have their final dtype and device, because the hooks
    depend on both. Parameters that are in another buffer are removed from it; the attribute `grad_buffer` of
    a parameter is its buffer.

    Args:
        parameters: floating-point parameters, all on one device.
        factor_of: the factor of a parameter's gradients in addition to the loss scale; divided out here.

    Attributes:
        flat: (elements,) fp32, the tensor to all-reduce.
        parameters: each once, in the order given.

    Raises:
        UserError: the parameters are on several devices.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, factor_of: FactorOf | None = None
    ) -> None:
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        devices = {parameter.device for parameter in unique}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UserError(f"parameters are on several devices ({names}): move the model to one of them")
        elements = sum(parameter.numel() for parameter in unique)
        self.parameters = unique
        self.flat = torch.zeros(elements, dtype=torch.float32, device=devices.pop() if devices else None)
        self.factor_of = factor_of
        self._arrivals: dict[int, None] = {}  # ids of parameters in the order of backward: an ordered set
        self._squares_before: dict[int, torch.Tensor] | None = None  # by parameter id, before a reduction
        offset = 0
        self._hooks: dict[int, list[Any]] = {}
        # by parameter id: the alias of `main_grad` that becomes `.grad`, and its address when it was made
        self._aliases: dict[int, tuple[torch.Tensor, int]] = {}
        self._aliased: set[int] = set()  # ids of parameters whose `.grad` is this alias
        self._in_graphs: set[int] = set()  # ids of parameters to which a capture has added a gradient
        self._frozen: set[int] = set()  # ids of parameters that were frozen when they were last cleared
        self._stream = _stream_of(self.flat)
        self._captured: tuple[int, Any] | None = None  # the last capture, and its stream
        for parameter in reversed(unique):
            _leave_buffer(parameter)
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.main_grad = view  # type: ignore[attr-defined]  # the name that Megatron uses
            parameter.grad_buffer = self  # type: ignore[attr-defined]  # an optimizer finds the buffer here
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = None  # any dtype: half during backward, fp32 afterwards
            self._hooks[id(parameter)] = [
                parameter.register_hook(partial(self._clear_grad, parameter)),
                parameter.register_post_accumulate_grad_hook(self._accumulate),
            ]
            offset += parameter.numel()

    @torch.no_grad()
    def collect(self, names: Mapping[int, str] | None = None) -> None:
        """Update every `main_grad` whose `.grad` was cleared or replaced since backward.

        Error messages name a parameter by its id in `names`.

        Raises:
            UserError: a `.grad` has another shape or device than its parameter, or is sparse; or a CUDA graph
                adds to it, and it was set to None or replaced.
        """
        for parameter in self.parameters:
            self._collect_grad(parameter, names)
        if self.is_reduced:
            self._drop_absent()

    def has_gradients(self) -> bool:
        """Whether there is any gradient since the last step, also if it is zero; call `collect` first.

        Reads the device if no backward has run, because other code or the replay of a CUDA graph may have
        written to a `main_grad`.
        """
        return bool(self._aliased - self._in_graphs) or any(bool(each.any()) for each in self._gradients())

    def before_reduction(self) -> torch.Tensor:
        """Call this directly before averaging over ranks; records which gradients are not finite on this
        rank.

        Afterwards every parameter has a `.grad`, because some rank may have one. One that was frozen before
        the last step ended has none, unless it was set by hand. If it was frozen since then, the next
        `collect` looks whether any rank has a gradient: all ranks must decide the same.

        Returns:
            `flat`.
        """
        self.collect()
        self._squares_before = dict(
            zip(map(id, self.parameters), _squares_of(self._gradients()), strict=True)
        )
        for parameter in self.parameters:
            if parameter.requires_grad or id(parameter) not in self._frozen:
                self._set_alias(parameter)
        return self.flat

    @property
    def is_reduced(self) -> bool:
        """Whether `before_reduction` was called for the current gradients."""
        return self._squares_before is not None

    def overflowed(self, *, is_before: bool) -> list[tuple[int, torch.nn.Parameter]]:
        """Parameters whose gradient is infinite or NaN, each with its index in the order of backward.

        Reads the device.

        `is_before`: check the gradients as they were at `before_reduction`, else as they are now.
        """
        if not self.parameters:
            return []
        if is_before and self._squares_before is not None:
            squares = torch.stack([self._squares_before[id(each)] for each in self.parameters])
        else:
            squares = _squares_of(self._gradients())
        bad = {
            id(each)
            for each, ok in zip(self.parameters, torch.isfinite(squares).tolist(), strict=True)
            if not ok
        }
        late = [each for each in self.parameters if id(each) not in self._arrivals]
        by_id = {id(each): each for each in self.parameters}
        order = [*(by_id[key] for key in self._arrivals if key in by_id), *late]
        return [(place, each) for place, each in enumerate(order) if id(each) in bad]

    @torch.no_grad()
    def zero(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clear the gradients of `parameters` or all, including a `.grad` that was not collected yet."""
        chosen = self.parameters if parameters is None else list(parameters)
        self.release_held(chosen)
        views: list[torch.Tensor] = [parameter.main_grad for parameter in chosen]  # type: ignore[attr-defined]
        if len(chosen) == len(self.parameters):
            self.flat.zero_()
            here = self.flat.untyped_storage().data_ptr()  # other code may have replaced a `main_grad`
            views = [view for view in views if view.untyped_storage().data_ptr() != here]
        if views:
            torch._foreach_zero_(views)
        self.mark_zeroed(chosen)

    @torch.no_grad()
    def release_held(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give each `.grad` that other code holds memory of its own; call it before zeroing `main_grad`s."""
        for parameter in parameters:
            found = self._aliases.get(id(parameter))
            if found is None or id(parameter) in self._in_graphs or sys.getrefcount(found[0]) <= UNHELD:
                continue
            held = found[0]
            held.set_(held.clone())  # type: ignore[call-overload]  # the stub only accepts storages
            del self._aliases[id(parameter)]
            if parameter.grad is held:
                self._set_alias(parameter)

    def mark_zeroed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call this after zeroing `main_grad`s in another way; sets the `.grad`s to None.

        If a CUDA graph adds to a `main_grad`, `.grad` is the zeros.
        """
        self._squares_before = None
        self._mark_zeroed(parameters)

    def _mark_zeroed(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self._frozen.discard(id(parameter))
            else:
                self._frozen.add(id(parameter))
            if id(parameter) in self._in_graphs:
                self._set_alias(parameter)
            else:
                parameter.grad = None
                self._aliased.discard(id(parameter))

    def detach(self) -> None:
        """Remove the hooks and views; the parameters get ordinary gradients again."""
        for parameter in list(self.parameters):
            self.release(parameter)

    def release(self, parameter: torch.Tensor) -> None:
        """Remove one parameter from the buffer; its place remains, filled with zeros."""
        for hook in self._hooks.pop(id(parameter)):
            hook.remove()
        self.release_held([parameter])
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
        self._in_graphs.discard(id(parameter))
        self.mark_zeroed([parameter])
        self._frozen.discard(id(parameter))
        self._aliases.pop(id(parameter), None)
        parameter.grad_dtype = parameter.dtype
        del parameter.main_grad, parameter.grad_buffer  # type: ignore[attr-defined]
        self.parameters = [each for each in self.parameters if each is not parameter]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self.parameters]  # type: ignore[attr-defined]

    @torch.no_grad()
    def add_gradient(
        self,
        parameter: torch.nn.Parameter,
        accumulator: Node,
        add: Callable[[torch.Tensor, float], bool],
    ) -> bool:
        """Let a layer add a gradient to `main_grad` itself; see `slots.GradientSums` of the layers."""
        if not self._may_bypass_autograd(parameter, accumulator):
            return False
        if parameter.grad is not None or id(parameter) in self._aliased:
            self._collect_grad(parameter)
        main_grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if not add(main_grad, self._factor(parameter)):
            return False
        self._note_arrival(parameter)
        self._set_alias(parameter)
        return True

    def _may_bypass_autograd(self, parameter: torch.nn.Parameter, accumulator: Node) -> bool:
        """Whether nothing but this buffer would see a gradient of the current backward.

        A layer on another CUDA stream would not be ordered with other uses of `main_grad`. A capture has a
        stream of its own, and all that a graph does is ordered with what runs before and after its replays.
        There, the first stream that adds a gradient in a capture takes the place of the buffer's.
        """
        main_grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        return (
            all(each is not None and len(each) == 1 for each in hooks)  # those of this buffer
            and parameter.requires_grad
            and type(main_grad) is torch.Tensor
            and (main_grad.dtype, main_grad.device) == (torch.float32, parameter.device)
            and main_grad.shape == parameter.shape
            and not torch.is_anomaly_enabled()
            and self._is_ordered(main_grad)
            and _is_accumulating(accumulator)
        )

    def _is_ordered(self, main_grad: torch.Tensor) -> bool:
        """Whether what runs now is ordered with other uses of `main_grad`."""
        stream = _stream_of(main_grad)
        if stream == self._stream:
            return True
        capture = capture_of(main_grad.device)
        if capture is None:
            return False
        if self._captured is None or self._captured[0] != capture:
            self._captured = capture, stream
        return bool(self._captured[1] == stream)

    @torch.no_grad()
    def _accumulate(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or self._is_alias(parameter, gradient):  # layers have added theirs themselves
            return
        if gradient.is_sparse:
            raise UserError(SPARSE)
        if gradient.requires_grad:
            raise UserError(HAS_GRAPH)
        if gradient.dtype != parameter.dtype:  # torch also rounds fp32 gradients of custom functions
            gradient = gradient.to(parameter.dtype)
        self._note_arrival(parameter)
        main_grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        factor = self._factor(parameter)
        if cpu_kernels.can_accumulate(main_grad, gradient) and cpu_kernels.is_available():
            cpu_kernels.accumulate(main_grad, gradient, factor)
        else:
            main_grad.add_(gradient, alpha=factor)
        self._set_alias(parameter)

    def _factor(self, parameter: torch.nn.Parameter) -> float:
        return 1.0 if self.factor_of is None else 1.0 / self.factor_of(parameter)

    def _note_arrival(self, parameter: torch.nn.Parameter) -> None:
        self._arrivals.pop(id(parameter), None)
        self._arrivals[id(parameter)] = None
        if cuda_graphs.is_capturing(parameter.device):
            self._in_graphs.add(id(parameter))

    def _clear_grad(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Remove `.grad` before autograd adds to it; `_accumulate` then gets only the new gradient."""
        if gradient is None:  # layers have added theirs themselves
            return
        if not parameter.requires_grad:  # frozen since its forward: autograd adds nothing after this hook
            return
        # checked first because it is cheaper than checking which backward this is
        has_grad = parameter.grad is not None or id(parameter) in self._aliased
        if has_grad and _is_accumulating(torch._C._current_autograd_node()):
            self._collect_grad(parameter)
            parameter.grad = None

    def _collect_grad(self, parameter: torch.nn.Parameter, names: Mapping[int, str] | None = None) -> None:
        gradient, key = parameter.grad, id(parameter)
        main_grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if gradient is None:
            if key in self._aliased:  # other code has cleared it
                self._refuse_in_graphs(parameter, names, "set to None")
                self.release_held([parameter])
                main_grad.zero_()
                self._aliased.discard(key)
            return
        alias, address = self._aliases.get(key, (None, 0))
        if gradient is alias and gradient.data_ptr() == address:
            if address != main_grad.data_ptr():  # other code has replaced `main_grad`: use the new one
                self._set_alias(parameter)
            return
        if gradient.is_sparse:
            raise UserError(SPARSE)
        self._refuse_in_graphs(parameter, names, "replaced")
        check_fit((names or {}).get(key, "a parameter"), gradient, main_grad.shape, main_grad.device)
        main_grad.copy_(gradient.detach())
        self._set_alias(parameter)

    def _drop_absent(self) -> None:
        """After a reduction, set `.grad` to None for frozen parameters of which no rank had a gradient.

        Reads the device, only in the first step after a parameter was frozen.
        """
        key_of = {id(each): each for each in self.parameters if not each.requires_grad}
        frozen = [each for key, each in key_of.items() if key in self._aliased - self._in_graphs]
        if frozen:
            has_any = torch.stack([each.main_grad.any() for each in frozen]).tolist()  # type: ignore[attr-defined]
            self._mark_zeroed(each for each, is_any in zip(frozen, has_any, strict=True) if not is_any)

    def _refuse_in_graphs(
        self, parameter: torch.nn.Parameter, names: Mapping[int, str] | None, change: str
    ) -> None:
        """Reject a change of `.grad` that may have come before or after the replay of a CUDA graph.

        In a capture, the sum would change at each replay instead of once.
        """
        if id(parameter) in self._in_graphs or cuda_graphs.is_capturing(parameter.device):
            name = (names or {}).get(id(parameter), "a parameter")
            raise UserError(
                f"{name}.grad was {change}, but a CUDA graph adds gradients to it: clear it with "
                "optimizer.zero_grad() or zero_grad(set_to_none=False), before a capture too, or change it "
                "in place"
            )

    def _is_alias(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> bool:
        return id(parameter) in self._aliased and gradient is self._aliases[id(parameter)][0]

    def _set_alias(self, parameter: torch.Tensor) -> None:
        """Set `.grad` to an alias of `main_grad`; not a view, because `detach_` fails on views."""
        main_grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        alias, _ = self._aliases.get(id(parameter), (None, 0))
        address = main_grad.data_ptr()
        if alias is None or alias.data_ptr() != address or alias.dtype != main_grad.dtype:
            alias = torch.empty(0, dtype=main_grad.dtype, device=main_grad.device)
            alias.set_(main_grad)  # type: ignore[call-overload]  # the stub only accepts storages
            self._aliases[id(parameter)] = alias, address
        parameter.grad = alias
        self._aliased.add(id(parameter))


def check_fit(name: str, gradient: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    """Reject a `.grad` set by hand whose shape or device differs from that of the parameter `name`.

    Raises:
        UserError: names both shapes and devices.
    """
    if (gradient.shape, gradient.device) != (shape, device):
        raise UserError(
            f"{name}.grad has shape {tuple(gradient.shape)} on {gradient.device}, the parameter "
            f"{tuple(shape)} on {device}: set a gradient of that shape and device"
        )


def _is_accumulating(accumulator: Node) -> bool:
    """Whether the backward that runs now adds to a leaf's `.grad`; false in `torch.autograd.grad`."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # raised for a leaf in `autograd.grad`
        return False


def _stream_of(tensor: torch.Tensor) -> Any:
    """The stream on which operations on this tensor run now; None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _leave_buffer(parameter: torch.nn.Parameter) -> None:
    former: GradBuffer | None = getattr(parameter, "grad_buffer", None)
    if former is not None:
        former.release(parameter)


def _squares_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each tensor, (tensors,); not finite if the tensor is not."""
    if not tensors:
        return torch.zeros(0)
    if all(map(cpu_kernels.supports, tensors)) and cpu_kernels.is_available():
        return cpu_kernels.sums_of_squares(tensors)
    return torch.stack(list(torch._foreach_norm(tensors)))
