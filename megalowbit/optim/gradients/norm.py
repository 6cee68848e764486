"""Gradient statistics: non-finite values, norm, and number of exact zeros, in one pass and one all-reduce.

Gradients may be sharded over a model-parallel group. Each rank sums the squares of the parameters that it
counts, and one small all-reduce adds these sums. The result stays on the device until it is read
(`Measurement`).

- Parameters that several ranks or modules hold are counted once: those marked `shared` are skipped, and those
  not marked `tensor_model_parallel` are counted on the group's first rank only (Megatron's attributes).
- The all-reduce sums a 0/1 flag. It never takes the MAX of gradient values, because gloo's MAX drops NaN.
- Besides the norm of all gradients there is the sum of their norms, by which Metis clips. For that the
  squares of a parameter's shards must be added first, so the all-reduce carries one number for each
  parameter.
- Except on CPUs, squares are computed in fp32, and a finite gradient above 1.8e19 looks infinite. The caller
  therefore measures again with `is_exact` before it trusts a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import gather
from megalowbit.errors import UserError
from megalowbit.optim.kernels import cpu as cpu_kernels

# fp32 sums over 70 million elements had an error of 0.5 % of the norm; in pieces of 2**16, at the same speed,
# 2e-7
CHUNK = 2**16
CLIP_EPSILON = 1e-6  # prevents division by a zero norm, as in Megatron and torch
GradientNorm = Literal["global", "sum_of_norms"]


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """Statistics of a step's scaled gradients, read by the host.

    Attributes:
        found_inf: some gradient on some rank is infinite or NaN.
        norm: over all ranks and parameters; meaningless if `found_inf`.
        num_zeros: elements that are exactly zero; None: not counted.
    """

    found_inf: bool
    norm: float
    num_zeros: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Statistics of a step's scaled gradients on the device: 0-dim float64 each.

    Attributes:
        norm: over all parameters; meaningless if the flag is set.
        flag: > 0 if some gradient is not finite.
        zeros: number of elements that are exactly zero; None: not counted.
    """

    norm: torch.Tensor
    flag: torch.Tensor
    zeros: torch.Tensor | None = None

    def to(self, device: torch.device) -> Measurement:
        """A copy on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Measurement(norm=self.norm.to(device), flag=self.flag.to(device), zeros=zeros)

    def read(self, figures: Sequence[Sequence[torch.Tensor]] = ()) -> tuple[GradientFacts, list[list[float]]]:
        """Read everything in one copy, the one host read of an applied step.

        Args:
            figures: lists of (n,) tensors to read together with the rest.

        Returns:
            The facts, and the numbers of each list of figures, concatenated.
        """
        own = [self.norm, self.flag, *(() if self.zeros is None else (self.zeros,))]
        others = [each.to(self.norm.device) for some in figures for each in some]
        numbers = iter(torch.cat([torch.stack(own), *others]).tolist())
        norm, flag, *zeros = islice(numbers, len(own))
        facts = GradientFacts(found_inf=flag > 0, norm=norm, num_zeros=int(zeros[0]) if zeros else None)
        return facts, [list(islice(numbers, sum(map(len, some)))) for some in figures]


def is_counted_once(parameter: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this rank counts `parameter` in the norm and the number of zeros."""
    if getattr(parameter, "shared", False):
        return False
    is_own = getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)
    return is_own or group is None or process_group.rank(group) == 0


@torch.no_grad()
def measure_gradients(
    gradients: Sequence[torch.Tensor | None],
    *,
    is_counted: Sequence[bool] | None = None,
    kind: GradientNorm = "global",
    count_zeros: bool = False,
    group: dist.ProcessGroup | None = None,
    is_exact: bool = False,
) -> Measurement:
    """Measure all gradients of a step; collective over `group`, also for a rank without gradients.

    Args:
        gradients: fp32 or half-precision; None for parameters without one.
        is_counted: for each, whether this rank counts it (or its shard). The others are only checked for inf
            and NaN, because another rank or module counts them. None: all are counted.
        kind: the norm of all gradients together, or the sum of their norms. For the sum, every rank of
            `group` must hold the same parameters in the same order, as under tensor parallelism: shards are
            matched by their index.
        count_zeros: also count the elements that are exactly zero.
        group: the model-parallel group; None if gradients are not sharded.
        is_exact: compute every square in float64; slower.
    """
    counts = [True] * len(gradients) if is_counted is None else is_counted
    present = [(each, is_own) for each, is_own in zip(gradients, counts, strict=True) if each is not None]
    counted = [each for each, is_own in present if is_own]
    others = [each for each, is_own in present if not is_own]
    device = _device([*counted, *others], group)
    if kind == "sum_of_norms":
        squares = _squares_of_each(gradients, device, is_exact)  # (parameters,)
        zero = _nothing(device)
        own = [square if is_own else zero for square, is_own in zip(squares, counts, strict=True)]
        own_squares = torch.stack([zero, *own])
    else:
        of_counted, of_others = (_squares(each, device, is_exact)[0] for each in (counted, others))
        squares, own_squares = torch.cat([of_counted, of_others]), of_counted.sum().reshape(1)
    is_suspicious = ~torch.isfinite(squares).all()
    zeros = _count_zeros(counted, device) if count_zeros else _nothing(device)
    packet = torch.cat(
        [torch.stack([is_suspicious.double(), zeros]), torch.where(is_suspicious, 0.0, own_squares)]
    )
    if group is not None and process_group.world_size(group) > 1:
        collectives.all_reduce(packet, op=dist.ReduceOp.SUM, group=group)
    norm = packet[2:].sqrt().sum()
    return Measurement(norm=norm, flag=packet[0], zeros=packet[1] if count_zeros else None)


def check_same_parameters(count: int, group: dist.ProcessGroup | None) -> None:
    """Check that shards can be matched by their index; collective over `group`.

    Raises:
        UserError: ranks have different numbers of parameters, so a collective would hang.
    """
    counts = [count] if group is None else gather(count, group)
    if len(set(counts)) > 1:
        raise UserError(
            'gradient_norm "sum_of_norms" needs the same parameters on all ranks of the model-parallel '
            f'group, which have {counts}: use "global"'
        )


def clip_coefficient(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Factor ≤ 1, 0-dim, that reduces `norm` to `max_norm`."""
    return torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)


def gradient_divisor(norm: torch.Tensor, loss_scale: float, clip_grad: float) -> torch.Tensor | None:
    """The divisor that unscales and clips scaled gradients, 0-dim fp32; None if there is nothing to do.

    `norm` is that of the scaled gradients, 0-dim float64. `clip_grad` = 0 turns clipping off.
    """
    if clip_grad > 0:
        coefficient = clip_coefficient(clip_grad, norm / loss_scale)
        # clamped, because with an extreme norm the factor would be 0 and the step would do nothing
        return (loss_scale / coefficient).clamp(max=torch.finfo(torch.float32).max).float()
    return torch.full_like(norm, loss_scale, dtype=torch.float32) if loss_scale != 1.0 else None


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _squares(
    tensors: Sequence[torch.Tensor], device: torch.device, is_exact: bool
) -> tuple[torch.Tensor, list[int]]:
    """Sums of squares of pieces of the tensors, (pieces,) float64, and the number of pieces of each tensor.

    Empty tensors are left out. There is at least one piece, possibly a zero.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return _nothing(device).reshape(1), []
    counts = [1] * len(tensors)
    if _has_kernel(tensors):
        return cpu_kernels.sums_of_squares(tensors), counts
    if is_exact:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    else:
        pieces = [_chunks(tensor) for tensor in tensors]
        counts = list(map(len, pieces))
        norms = list(torch._foreach_norm([one for each in pieces for one in each], dtype=torch.float32))
    return torch.stack(norms).double() ** 2, counts


def _squares_of_each(
    gradients: Sequence[torch.Tensor | None], device: torch.device, is_exact: bool
) -> torch.Tensor:
    """Sum of squares of each gradient, (parameters,) float64; 0 for a parameter without one."""
    present = {index: each for index, each in enumerate(gradients) if each is not None and each.numel()}
    pieces, counts = _squares(list(present.values()), device, is_exact)
    squares = [_nothing(device)] * (len(gradients) + 1)
    for index, part in zip(present, pieces.split(counts) if counts else (), strict=True):
        squares[index] = part.sum()
    return torch.stack(squares)[:-1]  # one extra, because there may be no gradients


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.reshape(-1)
    return flat.split(CHUNK) if flat.device.type == "cpu" else [flat]  # GPUs already sum in pieces


def _has_kernel(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(cpu_kernels.supports, tensors)) and cpu_kernels.is_available()


def _count_zeros(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = _nothing(device)
    for gradient in gradients:
        total += gradient.numel() - torch.count_nonzero(gradient)
    return total


def _device(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.device:
    if gradients:
        return gradients[0].device
    # a rank without gradients still has to send its zeros, if not over this group, then over that of the step
    return process_group.exchange_device(group)
