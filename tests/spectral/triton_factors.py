"""The Triton kernels for factors against float64 and torch's operations: `python triton_factors.py cpu rows`.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import os
import sys
from unittest import mock

import torch

from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import EncodeRequest
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.tensor_statistics import tensor_maximum
from megalowbit.spectral import low_rank, orthogonal
from megalowbit.spectral import split as splitting
from megalowbit.spectral.orthogonal import cholesky_rows
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import right_factor, scaled_left, split
from megalowbit.spectral.state import SplitState
from megalowbit.spectral.triton import launch_factor_codes, launch_factors, launch_residual

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


def check_many(device):
    """Sixty rows in parts of several tiles, whose numbers differ in size by more than the range of fp32."""
    given = gaussian(60, 4200)
    for sizes in (torch.ones(3), torch.tensor([1e-30, 1.0, 1e25])):
        rows = (given * sizes.repeat_interleave(1400)).bfloat16()
        found = cholesky_rows(rows.to(device))
        assert found.is_independent.all()
        exact = torch.linalg.qr(rows.double().t()).Q.t()
        ours = found.rows.double().cpu()
        signs = (exact * ours).sum(1, keepdim=True).sign()
        assert (ours - signs * exact).abs().max() < 2**-7 * exact.abs().max()
        # the squares of lengths, of numbers rounded to bf16
        assert (gram_of(ours) - torch.eye(60, dtype=torch.float64)).abs().max() < 4e-3


def check_dependent(device):
    """Rows that add nothing, too short ones and those that are not finite become zero; the others do not."""
    given = gaussian(6, 40)
    rows = torch.stack([given[0], given[1] * 0, given[0] * 2, given[1] * 1e-6, given[2], given[3]])
    found = cholesky_rows(rows.bfloat16().to(device), least=1e-4)
    assert found.is_independent.tolist() == [True, False, False, False, True, True]
    assert not found.rows[1:4].any()
    live = found.rows[found.is_independent]
    assert torch.allclose(gram_of(live.cpu()), torch.eye(3, dtype=torch.float64), atol=5e-3)
    for bad in (torch.inf, torch.nan):
        rows[4, 7] = bad
        found = cholesky_rows(rows.bfloat16().to(device), least=1e-4)
        assert found.is_independent.tolist() == [True, False, False, False, False, True]
        assert found.rows.isfinite().all()
        assert not found.rows[4].any()
        with on_torch():
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
    product[3] = product[1]  # of equal length in every order of sums: they keep their order
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
        encoding = quantizer("nvfp4e2m1bnosr").encoding
        for side in ("left", "right"):
            expected_maximum = tensor_maximum(getattr(found.low_rank, side).t(), encoding)
            assert torch.equal(getattr(found.maxima, side), expected_maximum)
        assert float(found.maxima.residual) == 0


def check_codes(device):
    """Both factors at once get the bits of `reference`, and products those of torch's operations."""
    chosen = quantizer(launch_factor_codes.COVERED)
    for k, rows, cols, size in ((5, 300, 75, 1.0), (17, 16, 272, 1e-30), (3, 40, 33, 1e25)):
        left, right = ((gaussian(k, n, seed=n) * size).bfloat16() for n in (rows, cols))
        left[1], right[2, :20] = 0, 0
        values = gaussian(k, seed=1).abs()
        amax = [tensor_maximum(each.to(device), chosen.encoding) for each in (left, right)]
        maxima = launch_factors.Maxima(*amax, torch.zeros((), device=device))
        found = launch_factor_codes.quantized(
            chosen, *(each.to(device) for each in (left, right, values)), maxima
        )
        expected = []
        for name, matrix in (("left", left), ("right", right)):
            ours, theirs = (
                getattr(found, name),
                reference.encode(EncodeRequest(matrix, chosen.encoding, operand_dtype=torch.float32)),
            )
            for part in ("codes", "scales", "tensor_scale"):
                one, other = getattr(ours, part).cpu(), getattr(theirs, part)
                assert torch.equal(one.float(), other.float()), (name, part)
            expected.append(theirs.operand)
        assert torch.equal(found.tall.cpu(), (expected[0] * values.unsqueeze(1)).bfloat16().t())
        assert torch.equal(found.flat.cpu(), expected[1].bfloat16())


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


def check_residual(device):
    """The difference is rounded once; its maximum is the one that NVFP4's tensor scale follows from."""
    encoding = quantizer("nvfp4e2m1bnosr").encoding
    for rows, cols, rank in ((130, 75, 5), (3, 200, 1)):
        x, tall, flat = (gaussian(*shape).bfloat16() for shape in ((rows, cols), (rows, rank), (rank, cols)))
        exact = x.double() - tall.double() @ flat.double()
        for bad in (None, torch.inf, torch.nan):
            if bad is not None:
                x[1, 20], exact[1, 20] = bad, bad
            for matrix in (x, x.t().contiguous().t()):
                difference, amax = launch_residual.residual(
                    *(each.to(device) for each in (matrix, tall, flat))
                )
                torch.testing.assert_close(
                    difference.cpu().double(), exact, rtol=2.0**-8, atol=1e-6, equal_nan=True
                )
                assert torch.equal(amax, tensor_maximum(difference, encoding))
    x, ones = gaussian(5, 48, seed=6).bfloat16(), torch.ones(5, 1).bfloat16()
    found = launch_residual.residual(x.to(device), ones.to(device), x[:1].contiguous().to(device))
    assert torch.equal(found.difference.cpu(), x - x[:1])  # a mean row: the bits of torch


def check_split(device):
    """A split of a layer's operand is that of torch's operations, rounding aside."""
    x = ((gaussian(96, 4, seed=2) * 10) @ gaussian(4, 64, seed=3) + gaussian(96, 64)).bfloat16().to(device)
    for settings in (OperandSplit(rank=4), OperandSplit(method="mean")):
        arguments = {
            "rank": settings.rank_of(96, 64),
            "step": 1,
            "is_replay": False,
            "random_key": RandomKey(1),
        }
        found = split(x, settings, SplitState(), **arguments)
        encoding = quantizer("nvfp4e2m1bnosr").encoding
        assert torch.equal(found.residual_amax, tensor_maximum(found.residual, encoding))
        with mock.patch.object(splitting, "takes_row_maximum", return_value=False):
            again = split(x, settings, SplitState(), **arguments)  # the quantizer finds the factors' maxima
        assert all(torch.equal(a, b) for a, b in zip(parts_of(found), parts_of(again), strict=True))
        with on_torch():
            expected = split(x, settings, SplitState(), **arguments)
        assert found.residual_amax is not None
        assert expected.residual_amax is None
        for done in (found, expected):
            left, right = scaled_left(done.left, done.values, x.dtype), right_factor(done.right, x.dtype)
            exact = x.double() - left.double() @ right.double()
            torch.testing.assert_close(done.residual.double(), exact, rtol=2.0**-7, atol=1e-3)
        ours, theirs = (float(each.residual.double().norm()) for each in (found, expected))
        assert abs(ours / theirs - 1) < 0.02, (ours, theirs)


def parts_of(done):
    """What a split consists of."""
    return [done.residual, done.residual_amax, done.values, done.left.dequantize(), done.right.dequantize()]


def tensors(found):
    return list(vars(found).values()) if hasattr(found, "values") else [found.directions]


def error(x, found):
    made = (found.left.double() * found.values.double()) @ found.right.double().t()
    return float((x.double() - made).norm() / x.double().norm())


GROUPS = {
    "rows": check_rows,
    "many": check_many,
    "dependent": check_dependent,
    "order": check_order,
    "codes": check_codes,
    "factors": check_factors,
    "residual": check_residual,
    "split": check_split,
}

if __name__ == "__main__":
    os.environ[backends.BACKEND_VARIABLE] = "triton"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN and large integers
    GROUPS[sys.argv[2]](sys.argv[1])
    print("equal")
