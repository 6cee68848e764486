import pytest
import torch

from megalowbit.spectral.orthogonal import cholesky_rows, householder_rows, row_norms, scaled_rows

BOTH = pytest.mark.parametrize("orthonormalise", [cholesky_rows, householder_rows])


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def in_span(rows, of):
    """Largest part of the rows that a least-squares fit on other rows leaves over."""
    rows, of = rows.double(), of.double()
    left_over = rows - torch.linalg.lstsq(of.t(), rows.t()).solution.t() @ of
    return left_over.norm(dim=1).max().item()


@BOTH
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)]
)
def test_rows_become_orthonormal_and_span_the_same_in_the_order_given(orthonormalise, dtype, bound):
    given = gaussian(12, 200, dtype=dtype)
    found = orthonormalise(given)
    assert found.is_independent.all()
    assert int(found.fallbacks) == 0
    gram = found.rows.double() @ found.rows.double().t()
    assert torch.allclose(gram, torch.eye(12, dtype=torch.float64), atol=bound)
    for count in (1, 5, 12):
        assert in_span(found.rows[:count], given[:count]) < bound


@pytest.mark.parametrize("spread", [1e-25, 1e-3, 1e25])
def test_rows_of_very_different_lengths_and_sizes_do_no_harm(spread):
    given = gaussian(6, 50, dtype=torch.float32) * torch.logspace(0, -3, 6).unsqueeze(1) * spread
    found = cholesky_rows(given)
    gram = found.rows.double() @ found.rows.double().t()
    assert torch.allclose(gram, torch.eye(6, dtype=torch.float64), atol=1e-4)


@BOTH
def test_rows_that_add_nothing_become_zero_and_harm_none_that_follow(orthonormalise):
    given = gaussian(4, 30, dtype=torch.float32)
    rows = torch.stack([given[0], given[1], 2 * given[0] - given[1], given[2] * 0, given[2], given[3]])
    found = orthonormalise(rows)
    assert found.is_independent.tolist() == [True, True, False, False, True, True]
    assert not found.rows[2:4].any()
    live = found.rows[found.is_independent].double()
    assert torch.allclose(live @ live.t(), torch.eye(4, dtype=torch.float64), atol=1e-4)


@BOTH
def test_more_rows_than_numbers_in_one_give_no_more_than_there_are(orthonormalise):
    found = orthonormalise(gaussian(7, 3, dtype=torch.float32))
    assert found.rows.shape == (7, 3)
    assert found.is_independent.sum() == 3
    assert not found.rows[~found.is_independent].any()


@BOTH
@pytest.mark.parametrize("shape", [(3, 0), (3, 5)])
def test_nothing_gives_zeros(orthonormalise, shape):
    found = orthonormalise(torch.zeros(shape))
    assert found.rows.shape == shape
    assert not found.rows.any()
    assert not found.is_independent.any()


def test_a_failed_cholesky_factor_falls_back_to_householder():
    given = gaussian(3, 20, dtype=torch.float32)
    rows = torch.cat([given, given.sum(0, keepdim=True)])
    found = cholesky_rows(rows, shift=-1e-3)  # makes the dependent row's pivot negative
    assert found.fallbacks == 1
    assert torch.equal(found.rows, householder_rows(rows, shift=-1e-3).rows)
    assert cholesky_rows(rows).fallbacks == 0


def test_without_host_reads_a_strongly_shifted_factor_is_the_fallback():
    given = gaussian(3, 20, dtype=torch.float32)
    rows = torch.cat([given, given.sum(0, keepdim=True)])
    found = cholesky_rows(rows, shift=-1e-3, may_wait=False)
    assert found.fallbacks.item() == 1
    assert found.is_independent.tolist() == [True, True, True, False]
    gram = found.rows[:3].double() @ found.rows[:3].double().t()
    assert torch.allclose(gram, torch.eye(3, dtype=torch.float64), atol=0.02)
    sound = cholesky_rows(given, may_wait=False)
    assert sound.fallbacks.item() == 0
    assert torch.equal(sound.rows, cholesky_rows(given).rows)
    assert cholesky_rows(given * float("nan"), may_wait=False).fallbacks.item() == 0


@BOTH
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_no_row_from_a_non_finite_one_on_counts_as_independent(orthonormalise, bad):
    rows = gaussian(4, 20, dtype=torch.float32)
    rows[1, 3] = bad
    found = orthonormalise(rows)
    assert not found.is_independent[1:].any()
    assert int(found.fallbacks) == 0


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_lengths_neither_overflow_nor_underflow(size):
    given = gaussian(5, 64)
    expected = given.norm(dim=1) * size
    assert torch.allclose(row_norms((given * size).float()).double(), expected, rtol=1e-5, atol=0)
    assert row_norms(torch.zeros(2, 4)).tolist() == [0, 0]
    wide, power = scaled_rows((given * size).bfloat16())
    assert wide.dtype == torch.float32
    assert 0.5 <= wide.abs().max() < 1
    assert torch.log2(power).frac() == 0
