"""Orthonormalises rows in the given order: each row keeps what it adds to those before it.

The method is Cholesky QR: the Gram matrix, a k × k Cholesky factor, and one product. Householder reflections
take ten times as long for tall matrices and make a GPU's host wait. A row that adds almost nothing becomes
zero, because otherwise it would consist of rounding errors. The Gram matrix is scaled to a unit diagonal and
slightly shifted, so rows may have any length (Fukaya et al., "Shifted Cholesky QR", SISC 2020; without their
second pass, because rows are directions here and may overlap by a thousandth).

If the factorisation fails, a CPU falls back to Householder reflections. On a GPU the host would have to wait
to find out, so a strongly shifted factor is used there. Triton kernels do the whole in three launches
(`triton.launch_factors`); results differ from those of torch's operations by rounding errors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.spectral.triton import launch_factors

SHIFT = 20  # in units of the machine precision; about the rounding error of the Gram matrix
INDEPENDENT = 5  # in shifts: a row is kept if that share of its square is orthogonal to the rows before it
LEAST_SHARE = INDEPENDENT / (INDEPENDENT + 1)  # of a kept row's squared length, which the shift reduces
STRONG_SHIFT = 1e-2


class Orthonormal(NamedTuple):
    """The result of `cholesky_rows` and `householder_rows`.

    Attributes:
        rows: (k, n), orthonormal, or zero; fp32, or fp64 for fp64 input; bf16 if kernels computed them.
        is_independent: bool (k,): which rows are orthonormal.
        fallbacks: factorisations that failed: a number, or on a GPU an int64 tensor without dimensions.
    """

    rows: Tensor
    is_independent: Tensor
    fallbacks: int | Tensor = 0


def scaled_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, n) in fp32 (fp64: fp64) times a power of two that keeps squares in range, and that power."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rows.numel() == 0:
        return wide, wide.new_ones(())
    exponent = torch.frexp(rows.abs().amax().to(wide.dtype))[1]
    power = torch.ldexp(wide.new_ones(()), -exponent.clamp(-126, 126))
    return wide * power, power


def row_norms(rows: Tensor) -> Tensor:
    """Lengths of rows (k, n), in fp32 (fp64 for fp64), free of overflow and underflow in squares."""
    wide, power = scaled_rows(rows)
    return torch.linalg.vector_norm(wide, dim=1) / power


def cholesky_rows(
    rows: Tensor, *, least: float = 0.0, shift: float | None = None, may_wait: bool | None = None
) -> Orthonormal:
    """Orthonormalise by Cholesky QR.

    Args:
        rows: (k, n), any floating-point dtype. A row with a number that is not finite does not count as
            independent. The kernels make it zero and lose no other; with torch's operations no row may count,
            and the result may not be finite.
        least: rows shorter than this share of the longest count as zero.
        shift: added to the diagonal of the Gram matrix, which is 1; `None`: 20 ε of the precision used.
        may_wait: whether the host may read the outcome and fall back to `householder_rows`; `None`: only on a
            CPU, where that is free.
    """
    if shift is None and may_wait is None and launch_factors.covers(rows):
        shifts = {"shift": SHIFT * torch.finfo(torch.float32).eps, "strong_shift": STRONG_SHIFT}
        return Orthonormal(*launch_factors.cholesky_rows(rows, least=least, share=LEAST_SHARE, **shifts))
    wide, _ = scaled_rows(rows)
    shift = SHIFT * torch.finfo(wide.dtype).eps if shift is None else shift
    gram = wide @ wide.t()
    squares = gram.diagonal()
    is_used = squares.isfinite() & (squares > least**2 * squares.amax())
    scale = torch.where(is_used, squares.rsqrt(), 0.0)
    gram = gram * scale * scale.unsqueeze(1)
    factor, failed = _cholesky(gram, shift)
    fallbacks: int | Tensor = 0
    added: float | Tensor = shift
    if wide.device.type == "cpu" if may_wait is None else may_wait:
        if int(failed) and bool(gram.isfinite().all()):
            return householder_rows(rows, least=least, shift=shift)._replace(fallbacks=1)
    else:
        factor = torch.where(failed > 0, _cholesky(gram, STRONG_SHIFT)[0], factor)
        added = torch.where(failed > 0, STRONG_SHIFT, shift)
        fallbacks = ((failed > 0) & gram.isfinite().all()).to(torch.int64)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    # Row j comes out with the squared length 1 - shift · ‖L⁻¹_j‖²: 0 if it adds nothing to those before it.
    squares = 1 - added * inverse.square().sum(1)
    is_independent = is_used & (squares > LEAST_SHARE)
    used = torch.where(is_independent.unsqueeze(1), inverse * squares.rsqrt().unsqueeze(1) * scale, 0.0)
    return Orthonormal(used @ wide, is_independent, fallbacks)


def _cholesky(gram: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    gram.diagonal().fill_(1.0 + shift)
    factor, failed = torch.linalg.cholesky_ex(gram)
    return factor, failed


def householder_rows(rows: Tensor, *, least: float = 0.0, shift: float | None = None) -> Orthonormal:
    """Orthonormalise by Householder QR: exact, slow. Arguments as for `cholesky_rows`."""
    wide, _ = scaled_rows(rows)
    shift = SHIFT * torch.finfo(wide.dtype).eps if shift is None else shift
    k, n = wide.shape
    if wide.numel() == 0:
        return Orthonormal(wide, torch.zeros(k, dtype=torch.bool, device=wide.device))
    found, triangle = torch.linalg.qr(wide.t())
    added = torch.nn.functional.pad(triangle.diagonal().square(), (0, k - min(k, n)))
    squares = torch.linalg.vector_norm(wide, dim=1).square()
    is_used = squares > least**2 * squares.amax()
    is_independent = is_used & (added > INDEPENDENT * shift * squares) & added.isfinite()
    found = torch.nn.functional.pad(found.t(), (0, 0, 0, k - min(k, n)))
    return Orthonormal(torch.where(is_independent.unsqueeze(1), found, 0.0), is_independent)
