"""Methods for low-rank factors of a matrix, M ≈ U·diag(S)·Vᵀ.

In training, similar matrices are factored repeatedly. The default, `qb`, therefore starts from the previous
directions V: one product M·V, Cholesky QR, and one product Qᵀ·M, all in the precision of the matrix. This is
a step of orthogonal iteration, which tracks slowly changing directions. `power` is Metis's iteration.
`svd_lowrank` is torch's algorithm (Halko, Martinsson, Tropp, SIAM Review 2011), and `svd` is exact. `sampled`
computes V from a few rows, and `random` projects on random directions. `channels` takes the columns with the
largest norms as they are: outlier channels.

Factors of `qb` and `power` converge to singular vectors only over several steps. The columns of U are
orthonormal in `qb`, those of V in `sampled`. If the rank of the matrix is below k, the remaining columns are
zero; in bf16, so are directions below a two-thousandth of the strongest. Factors are stored as rows (k, n),
as quantizers need them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.philox import RandomKey
from megalowbit.spectral.orthogonal import Orthonormal, cholesky_rows, householder_rows, row_norms
from megalowbit.spectral.triton import launch_factors
from megalowbit.spectral.triton.launch_factors import Maxima


@dataclass(frozen=True, eq=False)
class LowRank:
    """M ≈ left · diag(values) · rightᵀ.

    Attributes:
        left: (rows, k), in the matrix's dtype; columns have unit length, unless the value is zero. Those of
            `channels` are 1 to 2 long.
        values: (k,), fp32 (fp64 for fp64), ≥ 0, descending.
        right: (cols, k), like left; zero if the value is zero.
    """

    left: Tensor
    values: Tensor
    right: Tensor


class Factored(NamedTuple):
    """Factors, and the start of the next factorisation.

    Attributes:
        low_rank: the factors.
        directions: (k, cols), in the matrix's dtype: unit rows that span the right factor. Where the matrix
            has no such direction, or is not finite, the one that was started from.
        fallbacks: see `Orthonormal.fallbacks`.
        maxima: of the factors, if kernels found them.
    """

    low_rank: LowRank
    directions: Tensor
    fallbacks: int | Tensor = 0
    maxima: Maxima | None = None


def gaussian(shape: tuple[int, int], matrix: Tensor, random_key: RandomKey) -> Tensor:
    """Normally distributed numbers, the same on every device, with dtype and device of `matrix`."""
    generator = torch.Generator(device="cpu").manual_seed(_seed(random_key, "gaussian"))
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(matrix)


def _seed(random_key: RandomKey, purpose: str) -> int:
    digest = hashlib.blake2b(f"{random_key.key} {random_key.step} {purpose}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def qb(matrix: Tensor, directions: Tensor, power_steps: int = 0) -> Factored:
    """Project on the range of M·V: U = cholqr(M·V), S·Vᵀ = UᵀM.

    Args:
        matrix: (rows, cols).
        directions: (k, cols), the start directions, in the matrix's dtype.
        power_steps: additional rounds, each from the directions of the round before.
    """
    return _iterated(matrix, directions, power_steps + 1, cholesky_rows)


def power(matrix: Tensor, directions: Tensor, niter: int) -> Factored:
    """Metis's iteration: U = qr(M·V), W = Mᵀ·U, S = ‖W_j‖, V = W/S, `niter` times, by Householder QR."""
    return _iterated(matrix, directions, niter, householder_rows)


def _iterated(
    matrix: Tensor, directions: Tensor, rounds: int, orthonormal: Callable[..., Orthonormal]
) -> Factored:
    fallbacks: int | Tensor = 0
    maxima = None
    for done in range(rounds):
        if done:  # a missing direction restarts orthogonal to the others
            again = cholesky_rows(directions)
            directions = torch.where(again.is_independent.unsqueeze(1), again.rows.to(directions), directions)
            fallbacks = fallbacks + again.fallbacks
        basis = orthonormal((matrix @ directions.t()).t(), least=_least(matrix.dtype))
        left = basis.rows.to(matrix.dtype)
        low_rank, directions, _, maxima = _from_left(left, left @ matrix, directions)
        fallbacks = fallbacks + basis.fallbacks if done else basis.fallbacks
    return Factored(low_rank, directions, fallbacks, maxima)


def _from_left(left: Tensor, product: Tensor, started_from: Tensor) -> Factored:
    """Factors from Uᵀ (k, rows), orthonormal or zero, and UᵀM (k, cols)."""
    if left.is_contiguous() and launch_factors.covers(left, product, started_from):
        found = launch_factors.ordered(left, product, started_from, least=_least(product.dtype))
        low_rank = LowRank(found.left.t(), found.values, found.right.t())
        return Factored(low_rank, found.directions, maxima=found.maxima)
    norms = row_norms(product)
    is_live = norms.isfinite() & (norms > _least(product.dtype) * norms.amax())
    values, order = torch.where(is_live, norms, 0.0).sort(descending=True, stable=True)
    is_live = is_live.index_select(0, order).unsqueeze(1)
    left, product, old = (each.index_select(0, order) for each in (left, product, started_from))
    right = (product / values.unsqueeze(1)).to(product.dtype)
    low_rank = LowRank(left.nan_to_num_(0, 0, 0).t(), values, torch.where(is_live, right, 0.0).t())
    return Factored(low_rank, torch.where(is_live, right, old))


def _least(dtype: torch.dtype) -> float:
    """Share of the largest singular value below which a direction is considered rounding error.

    Were it kept, it would turn into a copy of the largest, and be missing when the matrix has it again.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return max(torch.finfo(dtype).eps / 16, 200 * torch.finfo(wide).eps)


def from_directions(matrix: Tensor, directions: Tensor) -> Factored:
    """Project on given directions: U·S = M·V.

    Args:
        matrix: (rows, cols).
        directions: (k, cols) of any length, in the matrix's dtype; made orthonormal first.
    """
    basis = cholesky_rows(directions)
    directions = basis.rows.to(matrix.dtype)
    product = (matrix @ directions.t()).t()
    norms = row_norms(product)
    is_live = norms.isfinite() & (norms > 0)
    values, order = torch.where(is_live, norms, 0.0).sort(descending=True, stable=True)
    is_live = is_live.index_select(0, order).unsqueeze(1)
    product, directions = product.index_select(0, order).contiguous(), directions.index_select(0, order)
    left = torch.where(is_live, product / values.unsqueeze(1), 0.0).to(matrix.dtype)
    right = torch.where(is_live, directions, 0.0).to(matrix.dtype)
    return Factored(LowRank(left.t(), values, right.t()), directions, basis.fallbacks)


def svd_lowrank(matrix: Tensor, rank: int, niter: int, random_key: RandomKey) -> Factored:
    """torch.svd_lowrank with q = rank, in fp32 or fp64, with numbers from `random_key`.

    Args:
        matrix: (rows, cols); elements that are not finite count as zeros.
        rank: k.
        niter: power steps.
        random_key: key of the test matrix.
    """
    wide = _finite(matrix)
    is_flat = wide.shape[0] < wide.shape[1]
    tall = wide.t() if is_flat else wide
    basis = torch.linalg.qr(tall @ gaussian((tall.shape[1], rank), tall, random_key)).Q
    for _ in range(niter):
        basis = torch.linalg.qr(tall.t() @ basis).Q
        basis = torch.linalg.qr(tall @ basis).Q
    left, values, right = torch.linalg.svd(basis.t() @ tall, full_matrices=False)
    left = basis @ left
    if is_flat:
        left, right = right.t(), left.t()
    return _exact(matrix, left, values, right, rank)


def svd(matrix: Tensor, rank: int) -> Factored:
    """The `rank` leading singular triples, in fp32 or fp64; non-finite elements count as zeros. Slow."""
    left, values, right = torch.linalg.svd(_finite(matrix), full_matrices=False)
    return _exact(matrix, left, values, right, rank)


def sampled(matrix: Tensor, rank: int, fraction: float, random_key: RandomKey) -> Factored:
    """Right singular vectors of a few random rows, M projected on them.

    Args:
        matrix: (rows, cols); its non-finite elements count as zeros in the sample.
        rank: k.
        fraction: share of the rows in the sample; at least 2·k rows, if the matrix has them.
        random_key: key of the sample.
    """
    rows = matrix.shape[0]
    count = min(rows, max(2 * rank, math.ceil(fraction * rows)))
    generator = torch.Generator(device="cpu").manual_seed(_seed(random_key, "rows"))
    chosen = torch.randperm(rows, generator=generator, device="cpu")[:count]
    sample = _finite(matrix.index_select(0, chosen.to(matrix.device)))
    # eigenvectors of the small Gram matrix, mapped back, are the leading right singular vectors of the sample
    sample = (
        sample / sample.abs().amax().clamp_min(torch.finfo(sample.dtype).tiny) if sample.numel() else sample
    )
    vectors = torch.linalg.eigh(sample @ sample.t()).eigenvectors.flip(1)[:, :rank]
    return from_directions(matrix, _padded(vectors.t() @ sample, rank).to(matrix.dtype))


def random(matrix: Tensor, rank: int, random_key: RandomKey) -> Factored:
    """`qb` from random directions, without a power step."""
    return qb(matrix, gaussian((rank, matrix.shape[1]), matrix, random_key))


def channels(matrix: Tensor, rank: int) -> Factored:
    """The `rank` columns with the largest norms: U·S holds them exactly; each row of Vᵀ is 1 at its column.

    Values are the norms rounded down to powers of two, so columns of U are 1 to 2 long. Of equally long
    columns the first ones are taken. A column that is not finite counts as zeros.
    """
    norms = row_norms(matrix.t())
    places = torch.where(norms.isfinite(), norms, 0.0).sort(descending=True, stable=True)[1][:rank]
    right = matrix.new_zeros((len(places), matrix.shape[1])).scatter_(1, places.unsqueeze(1), 1.0)
    return given_channels(matrix, _padded(right, rank))


def given_channels(matrix: Tensor, directions: Tensor) -> Factored:
    """The columns where the rows of `directions` (k, cols) are 1, as in `channels`; zeros stand for none."""
    if not matrix.shape[1]:
        left = matrix.new_zeros((len(matrix), len(directions)))
        return Factored(LowRank(left, row_norms(directions), directions.t()), directions)
    columns = matrix.index_select(1, directions.argmax(1)).t()
    norms = torch.where(directions.any(1), row_norms(columns), 0.0).unsqueeze(1)
    is_used = norms.isfinite() & (norms > 0)
    values = torch.where(is_used, torch.ldexp(torch.ones_like(norms), torch.frexp(norms)[1] - 1), 0.0)
    values, order = values.sort(dim=0, descending=True, stable=True)
    columns, is_used, right = (each.index_select(0, order[:, 0]) for each in (columns, is_used, directions))
    left = torch.where(is_used, columns / values, 0.0).to(matrix.dtype)
    return Factored(LowRank(left.t(), values.squeeze(1), torch.where(is_used, right, 0.0).t()), right)


def _finite(matrix: Tensor) -> Tensor:
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return torch.where(wide.isfinite(), wide, 0.0)


def _padded(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows, padded with zeros."""
    return torch.nn.functional.pad(rows[:count], (0, 0, 0, max(0, count - len(rows))))


def _exact(matrix: Tensor, left: Tensor, values: Tensor, right: Tensor, rank: int) -> Factored:
    """From torch's U (rows, n), S (n,), Vᵀ (n, cols)."""
    values = _padded(values.unsqueeze(1), rank).squeeze(1)
    is_live = (values > 0).unsqueeze(1)
    left, right = (
        torch.where(is_live, _padded(each, rank), 0.0).to(matrix.dtype).contiguous()
        for each in (left.t(), right)
    )
    return Factored(LowRank(left.t(), values, right.t()), right)
