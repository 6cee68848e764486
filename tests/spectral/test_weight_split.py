import pytest
import torch

from megalowbit.spectral.weight_split import first_moments, full_weight, second_moments, weight_parts

OUT, IN, RANK = 7, 5, 3


@pytest.fixture
def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def moment():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_parts_of_a_weight_sum_to_it(weight):
    parts = weight_parts(weight, RANK)
    assert {part.dtype for part in parts} == {torch.float32}
    total = parts.residual.double() + parts.u.double() @ torch.diag(parts.s.double()) @ parts.v.double()
    assert (total - weight.double()).abs().max() < 1e-7
    assert (full_weight(parts) - weight).abs().max() <= 2 * torch.finfo(torch.float32).eps


def test_factors_are_the_largest_singular_triples_and_the_residual_holds_the_rest(weight):
    parts = weight_parts(weight, RANK)
    # eigenvalues of the Gram matrix: another way to singular values
    expected = torch.linalg.eigvalsh(weight.double().t() @ weight.double()).sqrt().flip(0)
    torch.testing.assert_close(parts.s.double(), expected[:RANK], rtol=1e-5, atol=0)
    assert torch.linalg.matrix_norm(parts.residual.double(), 2) == pytest.approx(
        expected[RANK].item(), rel=1e-5
    )
    for factor in (parts.u.t(), parts.v):
        torch.testing.assert_close(factor @ factor.t(), torch.eye(RANK), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (1, 4), (4, 1)])
def test_a_full_rank_split_leaves_no_residual(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    parts = weight_parts(weight, min(shape))
    assert [list(part.shape) for part in parts] == [
        list(shape), [shape[0], min(shape)], [min(shape)], [min(shape), shape[1]],
    ]  # fmt: skip
    assert parts.residual.abs().max() < 1e-5
    assert all(part.is_contiguous() for part in parts)


def test_a_zero_weight_has_zero_values_and_unit_directions():
    parts = weight_parts(torch.zeros(OUT, IN), RANK)
    assert parts.s.eq(0).all()
    assert parts.residual.eq(0).all()
    torch.testing.assert_close(parts.v.norm(dim=1), torch.ones(RANK))


def test_fp64_stays_fp64(weight):
    parts = weight_parts(weight.double(), RANK)
    assert parts.u.dtype == torch.float64
    assert (full_weight(parts) - weight.double()).abs().max() < 1e-14


def test_first_moments_are_the_gradients_of_the_factors(weight, moment):
    parts = weight_parts(weight.double(), RANK)
    u, s, v = (part.clone().requires_grad_() for part in parts[1:])
    # a loss whose gradient with respect to the whole weight is `moment`
    ((parts.residual + u @ torch.diag(s) @ v) * moment).sum().backward()
    found = first_moments(moment, parts)
    for gradient, expected in zip(found, (u.grad, s.grad, v.grad), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_second_moments_are_sums_of_squared_coefficients_written_out(weight, moment):
    parts = weight_parts(weight.double(), RANK)
    variance = moment.square()
    u, s, v = parts.u, parts.s, parts.v
    by_u, by_s, by_v = torch.zeros(OUT, RANK), torch.zeros(RANK), torch.zeros(RANK, IN)
    for k in range(RANK):
        for o in range(OUT):
            for i in range(IN):
                m = variance[o, i].item()
                by_u[o, k] += m * (s[k] * v[k, i]).item() ** 2
                by_s[k] += m * (u[o, k] * v[k, i]).item() ** 2
                by_v[k, i] += m * (s[k] * u[o, k]).item() ** 2
    for found, expected in zip(second_moments(variance, parts), (by_u, by_s, by_v), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-7)
        assert (found >= 0).all()


def test_second_moments_are_the_mean_squares_of_independent_gradients(weight):
    deviation = torch.rand(OUT, IN, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    parts = weight_parts(weight.double(), RANK)
    draws = torch.randn(20_000, OUT, IN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gradients = draws * deviation
    by_u = torch.einsum("noi,ki,k->nok", gradients, parts.v, parts.s).square().mean(0)
    by_s = torch.einsum("ok,noi,ki->nk", parts.u, gradients, parts.v).square().mean(0)
    by_v = torch.einsum("ok,noi,k->nki", parts.u, gradients, parts.s).square().mean(0)
    found = second_moments(deviation.square(), parts)
    for moments, expected in zip(found, (by_u, by_s, by_v), strict=True):
        torch.testing.assert_close(moments, expected, rtol=0.08, atol=0)


def test_the_weight_is_left_as_it_is(weight):
    before = weight.clone()
    parts = weight_parts(weight, RANK)
    for part in parts:
        part.zero_()
    assert torch.equal(weight, before)
