"""Is any gradient non-finite, how large are all together, how many are exactly zero: one pass, one message.

The gradients may be sharded over a model-parallel group. Each rank sums what it owns and the sums travel
together in one small all-reduce; the result stays on the device (`measure_…`) until someone reads it
(`inspect_…`). Parameters that several ranks or modules hold alike are counted once: those marked `shared`,
and those not marked `tensor_model_parallel` on ranks other than the group's first (Megatron's attributes).
MAX over gradient values is never used: gloo's MAX drops NaN. What is summed is a 0/1 flag.
Beside the norm of all gradients together there is the sum of their norms, by which Metis clips; a sharded
parameter's norm needs its shards' squares added first, so there one number per parameter travels.
Off CPUs squares are taken in fp32, and a finite gradient above 1.8e19 looks infinite: whoever reads a flag
measures again with `is_exact` before believing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.errors import UserError
from megalowbit.optim.kernels import cpu as cpu_kernels

# fp32 sums over 70 million elements lost 0.5 % of a norm; in pieces of 2**16 they lose 2e-7, as fast
CHUNK = 2**16
CLIP_EPSILON = 1e-6  # Megatron's and torch's guard against a zero norm
GradientNorm = Literal["global", "sum_of_norms"]


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """What one pass over the gradients found.

    Attributes:
        found_inf: some gradient on some rank is infinite or NaN.
        norm: norm over all ranks and parameters; meaningless where `found_inf`.
        num_zeros: elements that are exactly zero, or None if not asked for.
    """

    found_inf: bool
    norm: float
    num_zeros: int | None = None


def is_counted_once(parameter: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this rank is the one that counts `parameter` towards norm and zeros."""
    if getattr(parameter, "shared", False):
        return False
    is_own = getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)
    return is_own or group is None or process_group.rank(group) == 0


@torch.no_grad()
def measure_gradients(
    gradients: Sequence[torch.Tensor],
    *,
    uncounted: Sequence[torch.Tensor] = (),
    norm_type: float = 2.0,
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
    is_exact: bool = False,
) -> torch.Tensor:
    """Look at all gradients of a step; collective over `group`, also for a rank without any gradient.

    Args:
        gradients: fp32 or half-precision gradients that this rank counts.
        uncounted: gradients whose norm another rank or module counts; only checked for inf and NaN.
        norm_type: p ≥ 1 of the p-norm; `math.inf` for the largest magnitude.
        count_zeros: also count the elements that are exactly zero.
        group: the model-parallel group; None where gradients are not sharded.
        is_exact: take every power in float64; slower.

    Returns:
        (3,) float64 on the gradients' device: norm, whether any is not finite (> 0), zeros. The norm means
        nothing where the flag is set.

    Raises:
        UserError: `norm_type` is not in [1, inf].
    """
    if not norm_type >= 1:
        raise UserError(f"norm_type must be a number ≥ 1 or inf, not {norm_type!r}")
    device = _device(gradients, uncounted, group)
    powers = _powers(gradients, norm_type, device, is_exact)
    others = _powers(uncounted, norm_type, device, is_exact)
    is_suspicious = ~(torch.isfinite(powers).all() & torch.isfinite(others).all())
    zeros = _count_zeros(gradients, device) if count_zeros else _nothing(device)
    if norm_type == math.inf:
        return _largest(powers, is_suspicious, zeros, group)
    total = torch.where(is_suspicious, 0.0, powers.sum())
    reduced = _sum_over(torch.stack([total, is_suspicious.double(), zeros]), group)
    return torch.cat([reduced[:1] ** (1 / norm_type), reduced[1:]])


@torch.no_grad()
def measure_each_gradient(
    gradients: Sequence[torch.Tensor | None],
    *,
    is_counted: Sequence[bool],
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
    is_exact: bool = False,
) -> torch.Tensor:
    """Like `measure_gradients`, but the norm is the sum over the parameters of each gradient's 2-norm.

    Collective over `group`, in which every rank must hold the same parameters in the same order, as under
    tensor parallelism: shards are matched by their place.

    Args:
        gradients: one entry a parameter; None where it has no gradient.
        is_counted: of each parameter, whether this rank counts it (or its shard).
        count_zeros: also count the elements that are exactly zero.
        group: the model-parallel group; None where gradients are not sharded.
        is_exact: take every norm in float64; slower.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    counted = [
        gradient
        for gradient, counts in zip(gradients, is_counted, strict=True)
        if gradient is not None and counts
    ]
    device = _device(present, (), group)
    zeros = _count_zeros(counted, device) if count_zeros else _nothing(device)
    squares = _squares_of_each(gradients, device, is_exact)  # (parameters,)
    is_suspicious = ~torch.isfinite(squares).all()
    zero = _nothing(device)
    mine = [square if counts else zero for square, counts in zip(squares, is_counted, strict=True)]
    own = torch.where(is_suspicious, 0.0, torch.stack([zero, *mine]))
    packet = _sum_over(torch.cat([torch.stack([is_suspicious.double(), zeros]), own]), group)
    return torch.cat([packet[2:].sqrt().sum().reshape(1), packet[:2]])


def check_same_parameters(count: int, group: dist.ProcessGroup | None) -> None:
    """Make sure that shards can be matched by their place; collective over `group`.

    Raises:
        UserError: ranks have different numbers of parameters, and would wait for each other.
    """
    if group is None or process_group.world_size(group) == 1:
        return
    counts: list[Any] = [None] * process_group.world_size(group)
    dist.all_gather_object(counts, count, group=group)
    if len(set(counts)) > 1:
        raise UserError(
            'gradient_norm "sum_of_norms" needs the same parameters on all ranks of the model-parallel '
            f'group, which have {counts}: use "global"'
        )


def inspect_gradients(
    gradients: Sequence[torch.Tensor],
    *,
    uncounted: Sequence[torch.Tensor] = (),
    norm_type: float = 2.0,
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GradientFacts:
    """What `measure_gradients` finds, read by the host; a flag is looked into before it is believed."""

    def measure(is_exact: bool) -> torch.Tensor:
        return measure_gradients(
            gradients,
            uncounted=uncounted,
            norm_type=norm_type,
            count_zeros=count_zeros,
            group=group,
            is_exact=is_exact,
        )

    return _read(measure, count_zeros)


def inspect_each_gradient(
    gradients: Sequence[torch.Tensor | None],
    *,
    is_counted: Sequence[bool],
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GradientFacts:
    """What `measure_each_gradient` finds, read by the host; a flag is looked into before it is believed."""

    def measure(is_exact: bool) -> torch.Tensor:
        return measure_each_gradient(
            gradients, is_counted=is_counted, count_zeros=count_zeros, group=group, is_exact=is_exact
        )

    return _read(measure, count_zeros)


def clip_coefficient(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Factor ≤ 1, 0-dim, that brings `norm` down to `max_norm`."""
    return torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)


def _read(measure: Callable[[bool], torch.Tensor], count_zeros: bool) -> GradientFacts:
    norm, flag, num_zeros = measure(False).tolist()
    if flag > 0:
        norm, flag, num_zeros = measure(True).tolist()
    return GradientFacts(found_inf=flag > 0, norm=norm, num_zeros=int(num_zeros) if count_zeros else None)


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _powers(
    tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device, is_exact: bool
) -> torch.Tensor:
    """Sums of |x|^p (inf: the largest |x|) over pieces of the tensors, (pieces,) float64, never empty."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return _nothing(device).reshape(1)
    if norm_type == 2.0 and _has_kernel(tensors):
        return cpu_kernels.sums_of_squares(tensors)
    if is_exact:
        norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float64) for tensor in tensors]
    else:
        chunks = [chunk for tensor in tensors for chunk in _chunks(tensor)]
        norms = list(torch._foreach_norm(chunks, ord=norm_type, dtype=torch.float32))
    of_all = torch.stack(norms).double()
    return of_all if norm_type == math.inf else of_all**norm_type


def _squares_of_each(
    gradients: Sequence[torch.Tensor | None], device: torch.device, is_exact: bool
) -> torch.Tensor:
    """Sum of squares of each gradient, (parameters,) float64; 0 where there is none."""
    present = {index: each for index, each in enumerate(gradients) if each is not None and each.numel()}
    zero = _nothing(device)
    squares = [zero] * len(gradients)
    tensors = list(present.values())
    if not tensors:
        found: Iterable[torch.Tensor] = ()
    elif _has_kernel(tensors):
        found = cpu_kernels.sums_of_squares(tensors)
    elif is_exact:
        found = [torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in tensors]
    else:
        pieces = [_chunks(each) for each in tensors]
        norms = torch._foreach_norm([one for each in pieces for one in each], dtype=torch.float32)
        of_pieces = torch.stack(list(norms)).double() ** 2
        found = [part.sum() for part in of_pieces.split([len(each) for each in pieces])]
    for index, square in zip(present, found, strict=True):
        squares[index] = square
    return torch.stack([zero, *squares])[1:]


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.reshape(-1)
    return flat.split(CHUNK) if flat.device.type == "cpu" else [flat]  # GPUs sum in pieces by themselves


def _has_kernel(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(cpu_kernels.supports, tensors)) and cpu_kernels.is_available()


def _largest(
    norms: torch.Tensor, found_inf: torch.Tensor, zeros: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    # One slot per rank turns the maximum into a SUM, so flag, zeros and maxima still travel together.
    world_size = process_group.world_size(group) if group is not None else 1
    slots = torch.zeros(world_size, dtype=torch.float64, device=norms.device)
    mine = process_group.rank(group) if group is not None else 0
    slots[mine] = torch.where(found_inf, 0.0, norms.max())
    packet = _sum_over(torch.cat([torch.stack([found_inf.double(), zeros]), slots]), group)
    return torch.cat([packet[2:].max().reshape(1), packet[:2]])


def _count_zeros(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = _nothing(device)
    for gradient in gradients:
        total += gradient.numel() - torch.count_nonzero(gradient)
    return total


def _sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and process_group.world_size(group) > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
    return values


def _device(
    gradients: Sequence[torch.Tensor], uncounted: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> torch.device:
    for tensor in (*gradients, *uncounted):
        return tensor.device
    # a rank without gradients still has to send its zeros
    return process_group.exchange_device(group) if group is not None else torch.device("cpu")
