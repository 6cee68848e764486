import math

import pytest
import torch

from megalowbit.engine.zero.measure import GradientPieces, Piece


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), (2,))]


def pieces_of(parameters, generator):
    """Some of the first two parameters' gradients; the third has none here."""
    first = Piece(parameters[0], torch.randn(7, generator=generator), 5)
    second = Piece(parameters[1], torch.randn(5, generator=generator), 0)
    return [first, second]


def measured(parameters, pieces, gradient_norm="global", **options):
    names = [f"p{index}" for index in range(len(parameters))]
    gradients = GradientPieces(parameters, names=names, gradient_norm=gradient_norm, copies=None, group=None)
    return gradients.measure(pieces, count_zeros=True, **options)


def test_norm_and_zeros_are_those_of_all_pieces(parameters):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    pieces[1].gradient[:2] = 0
    squares = [float(piece.gradient.double().square().sum()) for piece in pieces]
    norm, flag, zeros = measured(parameters, pieces)
    assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    assert (flag, zeros) == (0, 2)
    norm, *_ = measured(parameters, pieces, "sum_of_norms")
    assert norm == pytest.approx(sum(map(math.sqrt, squares)), rel=1e-12)


@pytest.mark.parametrize("gradient_norm", ["global", "sum_of_norms"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_sets_the_flag_and_leaves_no_nan_in_the_norm(parameters, gradient_norm, value):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    pieces[1].gradient[3] = value
    norm, flag, *figures = measured(parameters, pieces, gradient_norm, figures=[torch.tensor([7.0])])
    assert flag > 0
    assert norm == 0.0
    assert figures[-1] == 7.0


@pytest.mark.parametrize("gradient_norm", ["global", "sum_of_norms"])
def test_a_square_that_fp32_does_not_hold_is_no_overflow(parameters, gradient_norm):
    pieces = [Piece(parameters[1], torch.full((5,), 1e30), 0)]
    norm, flag, _ = measured(parameters, pieces, gradient_norm)
    assert flag == 0
    assert norm == pytest.approx(math.sqrt(5) * 1e30, rel=1e-6)


def test_a_parameter_that_another_pipeline_stage_counts_is_only_checked(parameters):
    parameters[1].ds_pipe_replicated = True
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    norm, *_ = measured(parameters, pieces)
    assert norm == pytest.approx(float(pieces[0].gradient.double().norm()), rel=1e-6)
    pieces[1].gradient[0] = math.inf
    assert measured(parameters, pieces)[1] > 0


@pytest.mark.parametrize(("peers", "rank"), [((4, 5), None), ((3,), 3)])
def test_an_overflow_is_named_by_the_last_parameter_and_by_a_rank_that_is_alone(parameters, peers, rank):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    gradients = GradientPieces(
        parameters, names=["a", "b", "c"], gradient_norm="global", copies=None, group=None, peers=peers
    )
    assert gradients.locate_overflow(pieces) is None
    for piece in pieces:
        piece.gradient[0] = math.nan
    found = gradients.locate_overflow(pieces)
    assert (found.tensor, found.rank, found.num_tensors, found.num_gradients) == ("b", rank, 2, 3)
    assert found.ranks == peers
