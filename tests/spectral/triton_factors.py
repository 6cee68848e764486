"""The Triton kernels for factors against float64 and torch's operations: `python triton_factors.py cpu rows`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import os
import sys
from unittest import mock

import torch

from megalowbit.quantize import backends
from megalowbit.spectral import low_rank, orthogonal
from megalowbit.spectral.orthogonal import cholesky_rows
from megalowbit.spectral.triton import launch_factors

LEAST = 2.0**-12


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_torch():
    """Plain torch operations, on the same tensors."""
    return mock.patch.object(backends, "_backend_for", return_value="torch")


def gram_of(rows):
    return rows.double() @ rows.double().t()


def check_rows(device):
    """Orthonormal rows that span the same, in the order given; of every stride and size of numbers."""
    given = gaussian(5, 300)
    given[3] = given[0] - given[1] + 0.1 * given[3]  # adds little to those before it
    for size in (1e-30, 1.0, 1e30):
        for rows in (given * size, (given * size).t().contiguous().t()):
            rows = rows.bfloat16().to(device)
            assert launch_factors.covers(rows)
            found = cholesky_rows(rows)
            assert found.rows.dtype == torch.bfloat16
            assert found.is_independent.all()
            assert int(found.fallbacks) == 0
            exact = torch.linalg.qr(rows.double().cpu().t()).Q.t()
            ours = found.rows.double().cpu()
            signs = (exact * ours).sum(1, keepdim=True).sign()
            assert (ours - signs * exact).abs().max() < 2**-8 * exact.abs().max()
            with on_torch():  # no worse than torch's operations, rounded to bf16
                theirs = cholesky_rows(rows).rows.bfloat16().double().cpu()
            eye = torch.eye(5, dtype=torch.float64)
            worst = (gram_of(theirs) - eye).abs().max()
            assert (gram_of(ours) - eye).abs().max() < max(2 * worst, 1e-3)


def check_dependent(device):
    """Rows that add nothing, too short ones and those that are not finite become zero and harm no other."""
    given = gaussian(6, 40)
    rows = torch.stack([given[0], given[1] * 0, given[0] * 2, given[1] * 1e-6, given[2], given[3]])
    found = cholesky_rows(rows.bfloat16().to(device), least=1e-4)
    assert found.is_independent.tolist() == [True, False, False, False, True, True]
    assert not found.rows[1:4].any()
    live = found.rows[found.is_independent]
    assert torch.allclose(gram_of(live.cpu()), torch.eye(3, dtype=torch.float64), atol=5e-3)
    rows[4, 7] = torch.inf
    assert not cholesky_rows(rows.bfloat16().to(device)).is_independent[4]
    nothing = cholesky_rows(torch.zeros(3, 20, dtype=torch.bfloat16, device=device), least=LEAST)
    assert not nothing.rows.any()
    assert not nothing.is_independent.any()
    more = cholesky_rows(gaussian(7, 3).bfloat16().to(device))
    assert more.is_independent.sum() == 3
    with mock.patch.object(orthogonal, "SHIFT", -1e4):  # makes the dependent row's pivot negative
        failed = cholesky_rows(torch.cat([given[:3], given[:3].sum(0, keepdim=True)]).bfloat16().to(device))
    assert int(failed.fallbacks) == 1
    assert failed.is_independent.tolist() == [True, True, True, False]
    assert torch.allclose(gram_of(failed.rows[:3].cpu()), torch.eye(3, dtype=torch.float64), atol=0.03)


def check_order(device):
    """Ordering moves the same bits as torch's operations do; values and right factors agree to rounding."""
    left, product, start = (gaussian(6, n, seed=n).bfloat16().to(device) for n in (1030, 90, 91))
    start = start[:, :90]
    product = product * torch.tensor([1.0, 4.0, 0, 4.0, 2.0**-20, 2.0]).bfloat16().to(device).unsqueeze(1)
    product[3] = product[1].flip(0)  # of equal length: they keep their order
    for bad in (None, torch.inf, torch.nan):
        if bad is not None:
            left[0, 3], product[5, 2] = bad, bad
        found = low_rank._from_left(left, product, start)
        with on_torch():
            expected = low_rank._from_left(left.clone(), product, start)
        torch.testing.assert_close(found.low_rank.values, expected.low_rank.values, rtol=1e-6, atol=0)
        assert torch.equal(found.low_rank.left, expected.low_rank.left)
        for ours, theirs in (
            (found.low_rank.right, expected.low_rank.right),
            (found.directions, expected.directions),
        ):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def check_factors(device):
    """A warm step captures what torch's operations do, and gives the same bits again."""
    values = 1 / torch.arange(1, 41)
    sides = [torch.linalg.qr(gaussian(size, 40, seed=size)).Q for size in (150, 70)]
    x = ((sides[0] * values) @ sides[1].t()).bfloat16().to(device)
    start = gaussian(8, 70).bfloat16().to(device)
    found, again = (low_rank.qb(x, start, 1) for _ in range(2))
    for one, other in ((found, again), (found.low_rank, again.low_rank)):
        assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    with on_torch():
        expected = low_rank.qb(x, start, 1)
    ours, theirs = (error(x, each.low_rank) for each in (found, expected))
    assert ours < 1.001 * theirs, (ours, theirs)


def tensors(found):
    return list(vars(found).values()) if hasattr(found, "values") else [found.directions]


def error(x, found):
    made = (found.left.double() * found.values.double()) @ found.right.double().t()
    return float((x.double() - made).norm() / x.double().norm())


GROUPS = {"rows": check_rows, "dependent": check_dependent, "order": check_order, "factors": check_factors}

if __name__ == "__main__":
    os.environ[backends.BACKEND_VARIABLE] = "triton"
    GROUPS[sys.argv[2]](sys.argv[1])
    print("equal")
