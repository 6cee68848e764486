"""Is any gradient non-finite, how large are all together, how many are exactly zero: one pass, one message.

The gradients may be sharded over a model-parallel group. Each rank sums what it owns and the sums travel
together in one small all-reduce, followed by the only host read of an optimizer step. Parameters that several
ranks or modules hold alike are counted once: those marked `shared`, and those not marked
`tensor_model_parallel` on ranks other than the group's first (Megatron's attributes).
MAX over gradient values is never used: gloo's MAX drops NaN. What is summed is a 0/1 flag.
Beside the norm of all gradients together there is the sum of their norms, by which Metis clips; a sharded
parameter's norm needs its shards' squares added first, so there one number per parameter travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megalowbit import process_group
from megalowbit.errors import UserError

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
    return (
        getattr(parameter, "tensor_model_parallel", False) or process_group.rank(group) == 0 or group is None
    )


@torch.no_grad()
def inspect_gradients(
    gradients: Sequence[torch.Tensor],
    *,
    uncounted: Sequence[torch.Tensor] = (),
    norm_type: float = 2.0,
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GradientFacts:
    """Look at all gradients of a step; collective over `group`, also for a rank without any gradient.

    Args:
        gradients: fp32 gradients that this rank counts.
        uncounted: gradients whose norm another rank or module counts; only checked for inf and NaN.
        norm_type: p ≥ 1 of the p-norm; `math.inf` for the largest magnitude.
        count_zeros: also count the elements that are exactly zero.
        group: the model-parallel group; None where gradients are not sharded.

    Raises:
        UserError: `norm_type` is not in [1, inf].
    """
    if not norm_type >= 1:
        raise UserError(f"norm_type must be a number ≥ 1 or inf, not {norm_type!r}")
    device = _device(gradients, uncounted, group)
    norms = _chunk_norms(gradients, norm_type, device)
    others = _chunk_norms(uncounted, norm_type, device)
    suspicious = ~(torch.isfinite(norms).all() & torch.isfinite(others).all())
    zeros = (
        _count_zeros(gradients, device)
        if count_zeros
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    if norm_type == math.inf:
        return _inspect_largest(norms, suspicious, zeros, count_zeros, group)
    total = torch.where(suspicious, 0.0, norms.pow(norm_type).sum())
    power, flag, num_zeros = _reduce(torch.stack([total, suspicious.double(), zeros]), group)
    if flag > 0:
        return _inspect_huge(
            gradients, uncounted, norm_type, device, group, num_zeros if count_zeros else None
        )
    return GradientFacts(
        found_inf=False, norm=power ** (1 / norm_type), num_zeros=int(num_zeros) if count_zeros else None
    )


@torch.no_grad()
def inspect_each_gradient(
    gradients: Sequence[torch.Tensor | None],
    *,
    is_counted: Sequence[bool],
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GradientFacts:
    """Like `inspect_gradients`, but `norm` is the sum over the parameters of each gradient's 2-norm.

    Collective over `group`, in which every rank must hold the same parameters in the same order, as under
    tensor parallelism: shards are matched by their place.

    Args:
        gradients: one entry a parameter; None where it has no gradient.
        is_counted: of each parameter, whether this rank counts it (or its shard).
        count_zeros: also count the elements that are exactly zero.
        group: the model-parallel group; None where gradients are not sharded.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    counted = [
        gradient
        for gradient, counts in zip(gradients, is_counted, strict=True)
        if gradient is not None and counts
    ]
    device = _device(present, (), group)
    zeros = (
        _count_zeros(counted, device) if count_zeros else torch.zeros((), dtype=torch.float64, device=device)
    )
    norms, is_suspicious = _norms_of_each(gradients, device)
    norm, flag, num_zeros = _reduce_norms(norms, is_suspicious, zeros, is_counted, group)
    if flag > 0:  # as in _inspect_huge: it may only be a square that fp32 does not hold
        norms, is_suspicious = _exact_norms_of_each(gradients, device)
        norm, flag, num_zeros = _reduce_norms(norms, is_suspicious, zeros, is_counted, group)
    return GradientFacts(found_inf=flag > 0, norm=norm, num_zeros=int(num_zeros) if count_zeros else None)


def clip_coefficient(max_norm: float, norm: float) -> float:
    """Factor ≤ 1 that brings `norm` down to `max_norm`; 1 where `max_norm` is 0 (no clipping)."""
    return min(max_norm / (norm + CLIP_EPSILON), 1.0) if max_norm > 0 else 1.0


def _chunk_norms(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Norms of pieces of ≤ `CHUNK` elements, (pieces,) float64; non-finite where a piece holds NaN or inf."""
    chunks = [chunk for tensor in tensors if tensor.numel() for chunk in tensor.reshape(-1).split(CHUNK)]
    if not chunks:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(chunks, ord=norm_type)).double()


def _norms_of_each(
    gradients: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """2-norm of each gradient, 0-dim float64, 0 where there is none; and whether any is not finite."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    chunks: list[torch.Tensor] = []
    sizes = []
    for gradient in gradients:
        pieces = [] if gradient is None or not gradient.numel() else gradient.reshape(-1).split(CHUNK)
        chunks.extend(pieces)
        sizes.append(len(pieces))
    if not chunks:
        return [zero] * len(gradients), torch.zeros((), dtype=torch.bool, device=device)
    of_chunks = torch.stack(torch._foreach_norm(chunks)).double()
    # the norm of a parameter's norms is its norm, so a second pass over few numbers does it
    of_each = iter(torch._foreach_norm(of_chunks.split([size for size in sizes if size])))
    return [next(of_each) if size else zero for size in sizes], ~torch.isfinite(of_chunks).all()


def _exact_norms_of_each(
    gradients: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = [
        zero if gradient is None else torch.linalg.vector_norm(gradient, dtype=torch.float64)
        for gradient in gradients
    ]
    return norms, ~torch.isfinite(torch.stack([zero, *norms])).all()


def _reduce_norms(
    norms: Sequence[torch.Tensor],
    is_suspicious: torch.Tensor,
    zeros: torch.Tensor,
    is_counted: Sequence[bool],
    group: dist.ProcessGroup | None,
) -> list[float]:
    """Sum of the norms over the group, flag and zeros: one all-reduce of squares, then the one host read."""
    nothing = torch.zeros_like(zeros)
    mine = [norm if counts else nothing for norm, counts in zip(norms, is_counted, strict=True)]
    squares = torch.where(is_suspicious, 0.0, torch.stack([nothing, *mine]).square())
    packet = torch.cat([torch.stack([is_suspicious.double(), zeros]), squares])
    if group is not None and process_group.world_size(group) > 1:
        dist.all_reduce(packet, op=dist.ReduceOp.SUM, group=group)
    flag, num_zeros = packet[:2]
    return torch.stack([packet[2:].sqrt().sum(), flag, num_zeros]).tolist()


def _inspect_huge(
    gradients: Sequence[torch.Tensor],
    uncounted: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
    num_zeros: float | None,
) -> GradientFacts:
    # A finite gradient above 1.8e19 has an infinite square in fp32: look again, exactly. Rare, so not tuned.
    finite = [torch.isfinite(tensor).all() for tensor in (*gradients, *uncounted)]
    is_finite = torch.stack(finite).all() if finite else torch.ones((), dtype=torch.bool, device=device)
    powers = [
        torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float64) ** norm_type for tensor in gradients
    ]
    total = torch.stack(powers).sum() if powers else torch.zeros((), dtype=torch.float64, device=device)
    power, flag = _reduce(torch.stack([torch.where(is_finite, total, 0.0), (~is_finite).double()]), group)
    return GradientFacts(
        found_inf=flag > 0,
        norm=power ** (1 / norm_type),
        num_zeros=None if num_zeros is None else int(num_zeros),
    )


def _inspect_largest(
    norms: torch.Tensor,
    found_inf: torch.Tensor,
    zeros: torch.Tensor,
    count_zeros: bool,
    group: dist.ProcessGroup | None,
) -> GradientFacts:
    # One slot per rank turns the maximum into a SUM, so flag, zeros and maxima still travel together.
    slots = torch.zeros(process_group.world_size(group) if group is not None else 1, dtype=torch.float64)
    slots = slots.to(norms.device)
    slots[process_group.rank(group) if group is not None else 0] = torch.where(found_inf, 0.0, norms.max())
    flag, num_zeros, *largest = _reduce(torch.cat([torch.stack([found_inf.double(), zeros]), slots]), group)
    return GradientFacts(
        found_inf=flag > 0, norm=max(largest), num_zeros=int(num_zeros) if count_zeros else None
    )


def _count_zeros(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += gradient.numel() - torch.count_nonzero(gradient)
    return total


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """Sum over the group, then the one host read."""
    if group is not None and process_group.world_size(group) > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
    return values.tolist()


def _device(
    gradients: Sequence[torch.Tensor], uncounted: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> torch.device:
    for tensor in (*gradients, *uncounted):
        return tensor.device
    # A rank without gradients still has to send its zeros from where the group's backend can read them.
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
