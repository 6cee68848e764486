"""Split a matrix: M = U·diag(S)·Vᵀ + residual, with U and V quantised.

The residual is computed against the *quantised* factors ("compensated"), so it contains their rounding
errors. In the Metis repository it is computed against the unquantised ones ("seed"). Their rounding errors
are then lost, and the result is worse than without a split. The quantizer gets the factors as Uᵀ and Vᵀ, with
blocks along the rows and columns of M.

Products must multiply by `scaled_left` in `product_dtype`, as the residual did: the same bits are then
subtracted here and added there. Depending on the settings, factors are computed for one slice of M, or at
some micro-batches only; `state.py` describes what is kept.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit import cuda_graphs
from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape
from megalowbit.quantize.quantizer import takes_row_maximum
from megalowbit.spectral import low_rank
from megalowbit.spectral.gains import factors_of, gain
from megalowbit.spectral.low_rank import Factored, LowRank
from megalowbit.spectral.settings import WARM_METHODS, OperandSplit
from megalowbit.spectral.state import Kept, SplitState
from megalowbit.spectral.triton import launch_factor_codes, launch_residual
from megalowbit.spectral.triton.launch_factors import Maxima

Factor = QuantizedTensor | UnquantizedTensor


@dataclass(frozen=True, eq=False)
class SplitTensor:
    """x ≈ residual_gain · residual + left ᵀ · diag(values) · right.

    Attributes:
        residual: (rows, cols), in x's dtype, not yet quantised.
        left: Uᵀ, (k, rows).
        values: (k,), fp32: singular values times gains.
        right: Vᵀ, (k, cols).
        residual_gain: factor of the residual; 1.0 without gains.
        residual_amax: the residual's largest maximum of a finite block of 16 in a row, fp32, 0-dim; `None`:
            it was not computed.
        products: U·diag(values) (rows, k) and Vᵀ (k, cols) as they were subtracted, for further products;
            `None` if these need others, or make their own faster.
    """

    residual: Tensor
    left: Factor
    values: Tensor
    right: Factor
    residual_gain: float
    residual_amax: Tensor | None = None
    products: tuple[Tensor, Tensor] | None = None


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for computing factors: bf16 for 16-bit tensors (sums could overflow fp16), else the tensor's."""
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for products with factors: fp32 for fp16, else that of the tensor."""
    return torch.float32 if dtype == torch.float16 else dtype


def is_decoded_once(device: torch.device) -> bool:
    """Whether products read factors decoded once. A CPU multiplies by Uᵀ row by row, and decodes it so."""
    return device.type != "cpu"


def scaled_left(left: Factor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """U·diag(values) in `dtype`, rounded once: (rows, k), the transpose of a contiguous matrix on a CPU."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = values.to(wide)
    if left.operand_scale is not None:
        scale = scale * left.operand_scale
    if _is_exact_in(left, dtype) and dtype == torch.bfloat16 and is_decoded_once(values.device):
        factor = left.operand(dtype)
        out = factor.new_empty(factor.shape[::-1])
        return torch.mul(factor.t(), scale, out=out)  # computed in fp32, in one pass
    return (left.operand(wide) * scale.unsqueeze(1)).to(dtype).t()


def right_factor(right: Factor, dtype: torch.dtype) -> Tensor:
    """Vᵀ in `dtype`, rounded once: (k, cols)."""
    if _is_exact_in(right, dtype) and right.operand_scale is None:
        return right.operand(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    values = right.operand(wide)
    return (values if right.operand_scale is None else values * right.operand_scale).to(dtype)


def _is_exact_in(factor: Factor, dtype: torch.dtype) -> bool:
    """Whether `factor.operand(dtype)` holds its numbers exactly: codes, or a matrix of that dtype."""
    return dtype in (factor.exact_dtype, factor.dtype if factor.exact_dtype is None else None)


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
        x: floating-point, at least 16 bits, any shape, may be empty; flattened to (rows, cols). Elements that
            are not finite stay in the residual and do not affect the state.
        settings: settings of the split.
        state: state of this operand of this layer; updated.
        rank: k, see `OperandSplit.rank_of`; x may have fewer rows or columns.
        step: micro-batch; factors are refreshed if the last time was `refresh_every` or more micro-batches
            ago.
        is_replay: return the factors of this micro-batch's first forward, and do not change the state.
        random_key: key for starts, samples and stochastic rounding.

    Raises:
        UserError: `broadcast_dim` is not a leading axis of x, or a gain function returns an invalid result. A
            CUDA graph is being captured, and the split computes factors.
    """
    rows, cols = matrix_shape(x.shape)
    matrix = x.detach().reshape(rows, cols)
    with _no_autocast(x.device.type):
        first = _first_slice(x.detach(), settings.broadcast_dim)
        if settings.method == "mean":
            return _split_mean(matrix, first)
        if settings.method != "channels":  # it takes columns as they are
            first = first.to(work_dtype(x.dtype))
        maxima = None
        if isinstance(x, FakeTensor):  # a dry run needs shapes only; factors need values
            found = _nothing(first, rank)
        else:
            found, maxima = _factors(first, settings, state, rank, step, is_replay, random_key)
        if settings.broadcast_dim is not None:
            left = _repeated(found.left, x.shape, settings.broadcast_dim)
            found, maxima = LowRank(left, found.values, found.right), None
        return split_with(matrix, found, settings, random_key=random_key, maxima=maxima)


def split_with(
    matrix: Tensor,
    factors: LowRank,
    settings: OperandSplit,
    *,
    random_key: RandomKey,
    maxima: Maxima | None = None,
) -> SplitTensor:
    """Split a matrix (rows, cols) with given factors: quantise them, compute the residual, apply gains.

    Args:
        matrix: (rows, cols).
        factors: its U, S and V.
        settings: settings of the split.
        random_key: key for stochastic rounding.
        maxima: of these factors, if they are known; used once.

    Raises:
        UserError: a gain function returns an invalid result.
    """
    chosen = gain(settings.gains)
    values, gained, residual_gain = factors.values, factors.values, 1.0
    if chosen.name != "none":
        gains, residual_gain = factors_of(chosen, factors.values)
        gained = factors.values * gains.to(factors.values)
        values = gained if chosen.is_before_residual else factors.values
    left, right, tall, flat = _quantized_factors(
        LowRank(factors.left, values, factors.right),
        settings,
        product_dtype(matrix.dtype),
        random_key=random_key,
        maxima=maxima,
    )
    residual, amax = _residual(matrix, tall, flat, None if maxima is None else maxima.residual)
    is_same = settings.order != "seed" and values is gained and is_decoded_once(matrix.device)
    products = (tall, flat) if is_same else None
    return SplitTensor(residual, left, gained.to(torch.float32), right, residual_gain, amax, products)


def _quantized_factors(
    factors: LowRank,
    settings: OperandSplit,
    dtype: torch.dtype,
    *,
    random_key: RandomKey,
    maxima: Maxima | None,
) -> tuple[Factor, Factor, Tensor, Tensor]:
    """Uᵀ and Vᵀ quantised, and the matrices whose product the residual lacks, (rows, k) and (k, cols).

    The arguments are those of `split_with`; `dtype` is that of these matrices.
    """
    chosen = quantizer(settings.q_factors)
    known = maxima if maxima is not None and takes_row_maximum(chosen) else None
    is_seed, is_half = settings.order == "seed", dtype == torch.bfloat16
    if known is not None and is_half and not is_seed and launch_factor_codes.covers(chosen):
        sides = factors.left.t(), factors.right.t()
        return launch_factor_codes.quantized(chosen, *sides, factors.values.to(torch.float32), known)
    ready = dtype if is_half and is_decoded_once(factors.values.device) else None
    left, right = (
        chosen.quantize(
            getattr(factors, side).t().contiguous(),
            random_key=_derived(random_key, side),
            tensor_amax=None if known is None else getattr(known, side),
            operand_dtype=ready,
        )
        for side in ("left", "right")
    )
    if is_seed:
        wide = torch.promote_types(dtype, torch.float32)
        tall = (factors.left.to(wide) * factors.values.to(wide)).to(dtype)
        return left, right, tall, factors.right.t().to(dtype)
    tall = scaled_left(left, factors.values.to(torch.float32), dtype).contiguous()  # twice as fast below
    return left, right, tall, right_factor(right, dtype)


def _residual(
    matrix: Tensor, tall: Tensor, flat: Tensor, cleared: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Matrix - tall · flat in the matrix's dtype, and its amax if that comes with it, in `cleared` memory."""
    if launch_residual.covers(matrix, tall, flat):
        return launch_residual.residual(matrix, tall.contiguous(), flat.contiguous(), cleared)
    return torch.addmm(matrix.to(tall.dtype), tall, flat, alpha=-1).to(matrix.dtype), None


def _split_mean(matrix: Tensor, first: Tensor) -> SplitTensor:
    """Use the mean row as the only direction; it is not quantised, so there is nothing to compensate."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    mean = torch.div(first.sum(0, dtype=wide), max(1, len(first)), out=matrix.new_empty(matrix.shape[1]))
    # a mean that is not finite is replaced by 0, so the residual is the matrix itself in that column
    return _without(matrix, mean.nan_to_num_(0, 0, 0))


def without_mean(x: Tensor, mean: Tensor) -> SplitTensor:
    """Split an operand by a given mean row.

    Args:
        x: floating-point, at least 16 bits, any shape, may be empty; flattened to (rows, cols).
        mean: (cols,), finite; rounded to x's dtype.
    """
    with torch.no_grad(), _no_autocast(x.device.type):
        matrix = x.detach().reshape(matrix_shape(x.shape))
        return _without(matrix, mean.to(matrix))


def _without(matrix: Tensor, mean: Tensor) -> SplitTensor:
    mean = mean.unsqueeze(0)
    ones, amax, products = matrix.new_ones((1, len(matrix))), None, None
    if launch_residual.covers(matrix, mean, mean):
        products = ones.view(-1, 1), mean
        residual, amax = launch_residual.residual(matrix, *products)
    else:
        residual = matrix - mean
    return SplitTensor(
        residual=residual,
        left=UnquantizedTensor(values=ones),
        values=torch.ones(1, dtype=torch.float32, device=matrix.device),
        right=UnquantizedTensor(values=mean),
        residual_gain=1.0,
        residual_amax=amax,
        products=products,
    )


def _factors(
    matrix: Tensor,
    settings: OperandSplit,
    state: SplitState,
    rank: int,
    step: int,
    is_replay: bool,
    random_key: RandomKey,
) -> tuple[LowRank, Maxima | None]:
    """New or stored factors of a matrix, and maxima of new ones; updates the state for the next use."""
    cuda_graphs.refuse(
        matrix.device,
        "the choice of a split's factors, and read directions that later steps replace",
        "run this layer outside of the graph, or split with the method 'mean'",
    )
    kept = state.begin(step, is_replay=is_replay)
    fitting = kept.fitting(rank, matrix.shape[1], matrix)
    is_due = kept.is_due(step, settings.refresh_every)
    if fitting is not None and not is_due:
        reused = _reused(matrix, settings, fitting)
        if reused is not None:
            if not is_replay:
                state.finish(fitting)
                state.count("reused")
            return reused, None
    is_misfit = kept.directions is not None and (fitting is None or not is_due)
    start = fitting if settings.method in WARM_METHODS else None
    found = _found(matrix, settings, start, rank, random_key)
    if not is_replay:
        state.count("cold" if start is None else "warm")
        state.count("qr_fallback", found.fallbacks)
        state.count("misfit", int(is_misfit))
        state.finish(_to_keep(found, settings, (start or Kept()).refreshes + 1, step))
    return found.low_rank, found.maxima


def _nothing(matrix: Tensor, rank: int) -> LowRank:
    """Factors with zeros, in the right shapes."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    rows, cols = matrix.shape
    left, right = matrix.new_zeros((rank, rows)).t(), matrix.new_zeros((rank, cols)).t()
    return LowRank(left, matrix.new_zeros(rank, dtype=wide), right)


def _reused(matrix: Tensor, settings: OperandSplit, kept: Kept) -> LowRank | None:
    """Factors from the stored ones; `None` if `reuse` is "factors" and the number of rows differs."""
    assert kept.directions is not None, "checked by `fitting`"
    if settings.reuse == "directions":
        given = low_rank.given_channels if settings.method == "channels" else low_rank.from_directions
        return given(matrix, kept.directions).low_rank
    if kept.factors is None or len(kept.factors.left) != len(matrix):
        return None
    return kept.factors


def _found(
    matrix: Tensor, settings: OperandSplit, start: Kept | None, rank: int, random_key: RandomKey
) -> Factored:
    """Factorise with the configured method, starting from `start` if there is one."""
    method, niter = settings.method, settings.niter
    if method == "svd":
        return low_rank.svd(matrix, rank)
    if method == "svd_lowrank":
        return low_rank.svd_lowrank(matrix, rank, niter, random_key)
    if method == "sampled":
        return low_rank.sampled(matrix, rank, settings.sample_fraction, random_key)
    if method == "random":
        return low_rank.random(matrix, rank, random_key)
    if method == "channels":
        return low_rank.channels(matrix, rank)
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
    """The part of x to factorise, as a matrix (rows, cols)."""
    cols = matrix_shape(x.shape)[1]
    if axis is None:
        return x.reshape(-1, cols) if x.numel() else x.reshape(matrix_shape(x.shape))
    if axis >= x.ndim - 1:
        axes = f"0 to {x.ndim - 2}" if x.ndim > 1 else "none"
        raise UserError(
            f"split broadcast_dim = {axis} is not a leading axis of a tensor {tuple(x.shape)} "
            f"(possible: {axes}): set another, or null"
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
    # via Uᵀ, which is row-major and must be row-major afterwards
    return left.t().reshape(k, *one).expand(k, *leading).reshape(k, rows).t()


def _derived(random_key: RandomKey, purpose: str) -> RandomKey:
    digest = hashlib.blake2b(f"{random_key.key} {purpose}".encode(), digest_size=8).digest()
    return RandomKey(int.from_bytes(digest, "little"), random_key.step)


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # torch rejects "meta" there
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
