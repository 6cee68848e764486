import pytest
import torch

from megalowbit.quantize.philox import RandomKey
from megalowbit.spectral import low_rank
from megalowbit.spectral.low_rank import gaussian

KEY = RandomKey(7, 3)
RANK = 8


def start(x, rank=RANK, key=KEY):
    return gaussian((rank, x.shape[1]), x, key)


METHODS = {
    "qb": lambda x, rank: low_rank.qb(x, start(x, rank), 2),
    "power": lambda x, rank: low_rank.power(x, start(x, rank), 2),
    "svd_lowrank": lambda x, rank: low_rank.svd_lowrank(x, rank, 2, KEY),
    "svd": lambda x, rank: low_rank.svd(x, rank),
    "sampled": lambda x, rank: low_rank.sampled(x, rank, 0.1, KEY),
    "random": lambda x, rank: low_rank.random(x, rank, KEY),
    "channels": lambda x, rank: low_rank.channels(x, rank),
}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
# Shares of the best factors' energy; measured: .993 to .999, .987 to .995, .992 to .9996, 1, .953 to .978,
# .866 to .931, .135 to .270 (the matrix has no outlier channels).
LEAST_ENERGY = {
    "qb": 0.99,
    "power": 0.98,
    "svd_lowrank": 0.99,
    "svd": 0.9999,
    "sampled": 0.94,
    "random": 0.83,
    "channels": 0.1,
}


@EVERY_METHOD
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 120), (120, 300)])
def test_factors_capture_most_of_what_the_best_do(method, dtype, shape, spectra):
    x = spectra.matrix(*shape, dtype=dtype)
    found = METHODS[method](x, RANK).low_rank
    assert found.left.shape == (shape[0], RANK)
    assert found.right.shape == (shape[1], RANK)
    assert found.left.dtype == found.right.dtype == dtype
    assert found.values.dtype == torch.promote_types(dtype, torch.float32)
    assert (found.values.diff() <= 0).all()
    for factor in (found.left, found.right):
        lengths = factor.double().norm(dim=0)
        if method == "channels" and factor is found.left:
            lengths = lengths.log2().floor().exp2()  # values are powers of two
        assert torch.allclose(lengths, torch.ones(RANK).double(), atol=0.02)
    assert LEAST_ENERGY[method] < spectra.captured(x, found) < 1.0001


@EVERY_METHOD
@pytest.mark.parametrize("shape", [(0, 24), (3, 24), (24, 3), (1, 1), (5, 0)])
def test_any_shape_gives_all_columns_and_what_there_is(method, shape, spectra):
    x = spectra.matrix(*shape, dtype=torch.float32) if 0 not in shape else torch.zeros(shape)
    found = METHODS[method](x, RANK).low_rank
    assert (found.left.shape, found.right.shape) == ((shape[0], RANK), (shape[1], RANK))
    most = shape[1] if method == "channels" else min(shape)  # of directions with a length
    assert (found.values[most:] < 1e-5).all()
    if x.numel() and most <= RANK:
        assert torch.allclose(spectra.product(found), x.double(), atol=1e-4)


@EVERY_METHOD
def test_zeros_give_zeros(method, spectra):
    found = METHODS[method](torch.zeros(40, 24, dtype=torch.bfloat16), RANK).low_rank
    assert not found.values.any()
    assert not spectra.product(found).any()


@EVERY_METHOD
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_factors_of_a_matrix_that_is_not_finite_are_finite(method, bad, spectra):
    x = spectra.matrix(40, 24, dtype=torch.float32)
    x[5, 7] = bad
    found = METHODS[method](x, RANK)
    for part in (found.low_rank.left, found.low_rank.values, found.low_rank.right, found.directions):
        assert part.isfinite().all()


@EVERY_METHOD
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_matrices_are_factored_as_well_as_others(method, size, spectra):
    x = (spectra.matrix(60, 40) * size).float()
    found = METHODS[method](x, RANK).low_rank
    if method != "channels":
        assert ((x.double() - spectra.product(found)).norm() / x.double().norm()).item() < 0.6
    assert found.values.any()
    assert found.values.isfinite().all()


@EVERY_METHOD
def test_a_key_decides_everything_and_torchs_generator_is_left_alone(method, spectra):
    x = spectra.matrix(50, 30, dtype=torch.float32)
    state = torch.get_rng_state()
    first, again = (METHODS[method](x, RANK).low_rank for _ in range(2))
    assert torch.equal(first.left, again.left)
    assert torch.equal(torch.get_rng_state(), state)


def test_starts_differ_by_key_and_step_and_agree_between_dtypes():
    x = torch.zeros(1)
    first = gaussian((64, 64), x, KEY)
    assert abs(first.std().item() - 1) < 0.05
    for other in (RandomKey(8, 3), RandomKey(7, 4)):
        assert not torch.equal(gaussian((64, 64), x, other), first)
    assert torch.equal(gaussian((64, 64), x.bfloat16(), KEY), first.bfloat16())


@pytest.mark.parametrize("shape", [(90, 40), (40, 90)])
@pytest.mark.parametrize("niter", [0, 2])
def test_svd_lowrank_is_torchs_on_the_same_random_numbers(shape, niter, monkeypatch, spectra):
    x = spectra.matrix(*shape, dtype=torch.float32)
    drawn = gaussian((min(shape), RANK), x, KEY)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", lambda *size, **_: drawn.reshape(size))
        left, values, right = torch.svd_lowrank(x, q=RANK, niter=niter)
    found = low_rank.svd_lowrank(x, RANK, niter, KEY).low_rank
    assert torch.allclose(found.values, values, rtol=1e-4)
    assert torch.allclose(spectra.product(found), ((left * values) @ right.t()).double(), atol=1e-4)


def test_warm_starts_converge_to_singular_triples(spectra):
    values = [8.0, 5.0, 3.0, 2.0, 0.5, 0.2, 0.1]
    x = spectra.matrix(80, 50, values=values)
    directions = start(x, rank=4)
    for _ in range(25):
        found = low_rank.qb(x, directions)
        directions = found.directions
    left, exact, right = torch.linalg.svd(x)
    assert torch.allclose(found.low_rank.values, exact[:4], rtol=1e-9)
    for ours, theirs in ((found.low_rank.left, left[:, :4]), (found.low_rank.right, right[:4].t())):
        assert torch.allclose((ours * theirs).sum(0).abs(), torch.ones(4).double(), atol=1e-9)


def test_warm_starts_follow_directions_that_drift(spectra):
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(size, 60, generator=generator) for size in (200, 80)]
    turns = [torch.randn(side.shape, generator=generator) for side in sides]
    directions, worst = None, 1.0
    for step in range(12):
        left, right = (
            torch.linalg.qr(side + 0.1 * step * turn).Q for side, turn in zip(sides, turns, strict=True)
        )
        x = ((left / torch.arange(1, 61)) @ right.t()).bfloat16()
        cold = directions is None
        found = low_rank.qb(x, start(x) if cold else directions, 2 if cold else 0)
        directions = found.directions
        worst = min(worst, spectra.captured(x, found.low_rank))
    assert worst > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", [low_rank.qb, low_rank.power])
def test_directions_survive_a_matrix_that_does_not_have_them(method, dtype, spectra):
    full = spectra.matrix(100, 60, dtype=dtype)
    poor = spectra.matrix(100, 60, values=[1.0], seed=5, dtype=dtype)
    directions = start(full)
    for x in (poor, poor, torch.zeros_like(full), poor):
        directions = method(x, directions, 1).directions
        assert torch.linalg.matrix_rank(directions.float(), rtol=1e-2) == RANK
    for _ in range(6):
        found = method(full, directions, 1)
        directions = found.directions
    assert spectra.captured(full, found.low_rank) > 0.995


def test_directions_stay_when_the_matrix_is_not_finite(spectra):
    x = spectra.matrix(40, 24, dtype=torch.float32)
    directions = low_rank.qb(x, start(x), 2).directions
    x[3, 3] = float("nan")
    assert torch.equal(low_rank.qb(x, directions).directions, directions)
    assert torch.equal(low_rank.power(x, directions, 1).directions, directions)
    kept = low_rank.qb(x, directions, 3).directions  # made orthonormal on the way
    assert torch.allclose(kept.t() @ kept, torch.linalg.pinv(directions) @ directions, atol=1e-4)


def test_given_directions_give_the_projection_on_their_span(spectra):
    x = spectra.matrix(60, 40)
    given = torch.randn(5, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = low_rank.from_directions(x, given).low_rank
    assert torch.allclose(spectra.product(found), x @ torch.linalg.pinv(given) @ given, atol=1e-8)


def test_a_larger_sample_captures_more(spectra):
    x = spectra.matrix(400, 60, dtype=torch.float32)
    shares = [
        spectra.captured(x, low_rank.sampled(x, 4, fraction, KEY).low_rank) for fraction in (0.02, 0.2, 1.0)
    ]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_channels_are_the_columns_with_the_largest_norms(dtype, size):
    x = torch.randn(60, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[:, [31, 4, 17]] *= torch.tensor([30.0, 20.0, 10.0], dtype=torch.float64)
    x = (x * size).to(dtype)
    found = low_rank.channels(x, 3)
    places = [31, 4, 17]
    assert torch.equal(found.directions, torch.eye(40, dtype=dtype)[places])
    assert torch.equal(found.low_rank.right, found.directions.t())
    columns = x[:, places].double()
    assert torch.equal(found.low_rank.left.double() * found.low_rank.values.double(), columns)
    ratios = columns.norm(dim=0) / found.low_rank.values
    assert ((ratios >= 1) & (ratios < 2)).all()


def test_equally_long_channels_are_taken_in_their_order():
    found = low_rank.channels(torch.ones(8, 40), 3)
    assert torch.equal(found.directions, torch.eye(40)[:3])


def test_a_channel_that_is_not_finite_is_not_taken(spectra):
    x = spectra.matrix(30, 20, dtype=torch.float32)
    x[:, 6], x[4, 6], x[:, 9], x[2, 9] = 1e3, float("inf"), 1e3, float("nan")
    assert not low_rank.channels(x, 5).directions[:, [6, 9]].any()
