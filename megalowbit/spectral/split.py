"""Split a matrix: M = U·diag(S)·Vᵀ + residual, with U and V quantised.

The residual is what the *quantised* factors leave over, so that their rounding errors are not lost
("compensated"); against the unquantised ones, as in the Metis repository, it misses them, and the whole
becomes worse than no split at all ("seed"). Factors go through their quantizer as Uᵀ and Vᵀ, in blocks along
rows and columns of M.

Whoever multiplies by U·diag(S) takes `scaled_left` in `product_dtype`, as the residual did: then the same
bits are subtracted here and added there. With settings that ask for it, factors are found for one slice of M,
or at some micro-batches only; `state.py` says what is kept.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape
from megalowbit.spectral import low_rank
from megalowbit.spectral.gains import factors_of, gain
from megalowbit.spectral.low_rank import Factored, LowRank
from megalowbit.spectral.settings import WARM_METHODS, OperandSplit
from megalowbit.spectral.state import Kept, SplitState

Factor = QuantizedTensor | UnquantizedTensor


@dataclass(frozen=True, eq=False)
class SplitTensor:
    """x ≈ residual_gain · residual + left ᵀ · diag(values) · right.

    Attributes:
        residual: (rows, cols), in x's dtype; for the caller to quantise.
        left: Uᵀ, (k, rows).
        values: (k,), fp32: singular values, gains included.
        right: Vᵀ, (k, cols).
        residual_gain: factor of the residual; 1.0 without gains.
    """

    residual: Tensor
    left: Factor
    values: Tensor
    right: Factor
    residual_gain: float


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What factors are found in: bf16 for 16 bits (fp16 cannot hold the sums), else the tensor's own."""
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What factors are multiplied in: fp32 for fp16, else the tensor's own."""
    return torch.float32 if dtype == torch.float16 else dtype


def scaled_left(left: Factor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """U·diag(values) in `dtype`, rounded once: (rows, k)."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = values.to(wide)
    if left.tensor_scale is not None:
        scale = scale * left.tensor_scale
    return (left.operand(wide) * scale.unsqueeze(1)).to(dtype).t()


def right_factor(right: Factor, dtype: torch.dtype) -> Tensor:
    """Vᵀ in `dtype`, rounded once: (k, cols)."""
    wide = torch.promote_types(dtype, torch.float32)
    values = right.operand(wide)
    return (values if right.tensor_scale is None else values * right.tensor_scale).to(dtype)


@torch.no_grad()
def split(
    x: Tensor,  # (…, cols)
    settings: OperandSplit,
    state: SplitState,
    *,
    rank: int,
    step: int,
    is_replay: bool,
    random_key: RandomKey,
) -> SplitTensor:
    """Split one operand.

    Args:
        x: floating, at least 16 bits, any shape, may be empty; flattened to (rows, cols). Non-finite elements
            stay in the residual and leave the state alone.
        settings: how.
        state: of this operand of this layer; changed.
        rank: k, see `OperandSplit.rank_of`; x may have fewer rows or columns.
        step: micro-batch; factors are renewed `refresh_every` or more of them after the last time.
        is_replay: give the factors of this micro-batch's first time and leave the state as it is.
        random_key: of starts, samples and stochastic rounding.

    Raises:
        UserError: `broadcast_dim` is no leading axis of x, or a gain returns what it should not.
    """
    rows, cols = matrix_shape(x.shape)
    matrix = x.detach().reshape(rows, cols)
    with _no_autocast(x.device.type):
        first = _first_slice(x.detach(), settings.broadcast_dim)
        if settings.method == "mean":
            return _split_mean(matrix, first)
        first = first.to(work_dtype(x.dtype))
        if isinstance(x, FakeTensor):  # a dry run wants shapes; factors ask for numbers
            found = _nothing(first, rank)
        else:
            found = _factors(first, settings, state, rank, step, is_replay, random_key)
        if settings.broadcast_dim is not None:
            left = _repeated(found.left, x.shape, settings.broadcast_dim)
            found = LowRank(left, found.values, found.right)
        return split_with(matrix, found, settings, random_key=random_key)


def split_with(
    matrix: Tensor, factors: LowRank, settings: OperandSplit, *, random_key: RandomKey
) -> SplitTensor:
    """Split a matrix (rows, cols) with given factors: quantise them, take the residual, apply gains.

    Raises:
        UserError: a gain returns what it should not.
    """
    quantize = quantizer(settings.q_factors).quantize
    left = quantize(factors.left.t().contiguous(), random_key=_derived(random_key, "left"))
    right = quantize(factors.right.t().contiguous(), random_key=_derived(random_key, "right"))
    chosen = gain(settings.gains)
    gains, residual_gain = factors_of(chosen, factors.values)
    gained = factors.values * gains.to(factors.values)
    values = gained if chosen.is_before_residual else factors.values
    dtype = product_dtype(matrix.dtype)
    if settings.order == "seed":
        wide = torch.promote_types(dtype, torch.float32)
        tall = (factors.left.to(wide) * values.to(wide)).to(dtype)
        flat = factors.right.t().to(dtype)
    else:
        tall = scaled_left(left, values.to(torch.float32), dtype).contiguous()  # twice as fast below
        flat = right_factor(right, dtype)
    residual = torch.addmm(matrix.to(dtype), tall, flat, alpha=-1).to(matrix.dtype)
    return SplitTensor(residual, left, gained.to(torch.float32), right, residual_gain)


def _split_mean(matrix: Tensor, first: Tensor) -> SplitTensor:
    """The mean row as the only direction: nothing is quantised, so nothing has to be compensated."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    mean = (first.sum(0, dtype=wide) / max(1, len(first))).to(matrix.dtype)
    # A row that is not finite leaves its columns' means so; the residual then is the matrix itself there.
    mean = torch.where(mean.isfinite(), mean, 0.0).to(matrix.dtype)
    return SplitTensor(
        residual=matrix - mean,
        left=UnquantizedTensor(values=matrix.new_ones((1, len(matrix)))),
        values=torch.ones(1, dtype=torch.float32, device=matrix.device),
        right=UnquantizedTensor(values=mean.unsqueeze(0)),
        residual_gain=1.0,
    )


def _factors(
    matrix: Tensor,
    settings: OperandSplit,
    state: SplitState,
    rank: int,
    step: int,
    is_replay: bool,
    random_key: RandomKey,
) -> LowRank:
    """Factors of a matrix, new or kept; keeps what the next use needs."""
    kept = state.begin(step, is_replay=is_replay)
    fitting = kept.fitting(rank, matrix.shape[1], matrix)
    is_due = kept.is_due(step, settings.refresh_every)
    if fitting is not None and not is_due:
        reused = _reused(matrix, settings, fitting)
        if reused is not None:
            if not is_replay:
                state.finish(fitting)
                state.count("reused")
            return reused
    is_misfit = kept.directions is not None and (fitting is None or not is_due)
    start = fitting if settings.method in WARM_METHODS else None
    found = _found(matrix, settings, start, rank, random_key)
    if not is_replay:
        state.count("cold" if start is None else "warm")
        state.count("qr_fallback", found.fallbacks)
        state.count("misfit", int(is_misfit))
        state.finish(_to_keep(found, settings, (start or Kept()).refreshes + 1, step))
    return found.low_rank


def _nothing(matrix: Tensor, rank: int) -> LowRank:
    """Factors of zeros, of the right shapes."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    rows, cols = matrix.shape
    left, right = matrix.new_zeros((rank, rows)).t(), matrix.new_zeros((rank, cols)).t()
    return LowRank(left, matrix.new_zeros(rank, dtype=wide), right)


def _reused(matrix: Tensor, settings: OperandSplit, kept: Kept) -> LowRank | None:
    """Factors from what was kept; `None` where whole factors are of another number of rows."""
    assert kept.directions is not None, "checked by `fitting`"
    if settings.reuse == "directions":
        return low_rank.from_directions(matrix, kept.directions).low_rank
    if kept.factors is None or len(kept.factors.left) != len(matrix):
        return None
    return kept.factors


def _found(
    matrix: Tensor, settings: OperandSplit, start: Kept | None, rank: int, random_key: RandomKey
) -> Factored:
    """Factorise by the chosen method, from `start` where there is one."""
    method, niter = settings.method, settings.niter
    if method == "svd":
        return low_rank.svd(matrix, rank)
    if method == "svd_lowrank":
        return low_rank.svd_lowrank(matrix, rank, niter, random_key)
    if method == "sampled":
        return low_rank.sampled(matrix, rank, settings.sample_fraction, random_key)
    if method == "random":
        return low_rank.random(matrix, rank, random_key)
    directions = None if start is None else start.directions
    if directions is None:
        directions = low_rank.gaussian((rank, matrix.shape[1]), matrix, random_key)
    if method == "power":
        return low_rank.power(matrix, directions, niter)
    if start is None:
        return low_rank.qb(matrix, directions, niter)
    is_power_step = settings.power_every > 0 and start.refreshes % settings.power_every == 0
    return low_rank.qb(matrix, directions, int(is_power_step))


def _to_keep(found: Factored, settings: OperandSplit, refreshes: int, step: int) -> Kept:
    is_reused = settings.refresh_every > 1
    if settings.method not in WARM_METHODS and not is_reused:
        return Kept(refreshes=refreshes)
    factors = found.low_rank if is_reused and settings.reuse == "factors" else None
    return Kept(found.directions, factors, refreshes, step)


def _first_slice(x: Tensor, axis: int | None) -> Tensor:
    """What is factored, as a matrix (rows, cols)."""
    cols = matrix_shape(x.shape)[1]
    if axis is None:
        return x.reshape(-1, cols) if x.numel() else x.reshape(matrix_shape(x.shape))
    if axis >= x.ndim - 1:
        axes = f"0 to {x.ndim - 2}" if x.ndim > 1 else "none"
        raise UserError(
            f"split broadcast_dim = {axis} is no leading axis of a tensor {tuple(x.shape)} "
            f"(those are: {axes}): set another, or null"
        )
    if x.shape[axis] == 0:
        return x.new_zeros((0, cols))
    first = x.select(axis, 0)
    return first.reshape(matrix_shape(first.shape))


def _repeated(left: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """U of one slice (rows of it, k) for all slices along `axis`: (rows, k)."""
    leading = shape[:-1]
    rows, k = math.prod(leading), left.shape[1]
    if rows == 0:
        return left.new_zeros((0, k))
    one = [*leading[:axis], 1, *leading[axis + 1 :]]
    # Through Uᵀ, which is stored row by row and has to be again.
    return left.t().reshape(k, *one).expand(k, *leading).reshape(k, rows).t()


def _derived(random_key: RandomKey, purpose: str) -> RandomKey:
    digest = hashlib.blake2b(f"{random_key.key} {purpose}".encode(), digest_size=8).digest()
    return RandomKey(int.from_bytes(digest, "little"), random_key.step)


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
