import math

import pytest
import torch

from megalowbit.engine.zero.pieces import GradientPieces, Piece, PieceRegularizer
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.optim.optimizers.options import StepOptions


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), (2,))]


def pieces_of(parameters, generator):
    """Pieces of the gradients of the first two parameters; this rank has none of the third."""
    first = Piece(parameters[0], torch.randn(7, generator=generator), 5)
    second = Piece(parameters[1], torch.randn(5, generator=generator), 0)
    return [first, second]


def gradients_of(parameters, gradient_norm="global", **more):
    names = [f"p{index}" for index in range(len(parameters))]
    options = StepOptions(clip_grad=0.0, gradient_norm=gradient_norm, log_num_zeros_in_grad=True)
    return GradientPieces(parameters, names=names, options=options, copies=None, **more)


def measured(parameters, pieces, gradient_norm="global", *, is_exact=False):
    return gradients_of(parameters, gradient_norm).measure(pieces, is_exact=is_exact)


def test_norm_and_zeros_cover_all_pieces(parameters):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    pieces[1].gradient[:2] = 0
    squares = [float(piece.gradient.double().square().sum()) for piece in pieces]
    found, _ = measured(parameters, pieces).read()
    assert found.norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    assert (found.found_inf, found.num_zeros) == (False, 2)
    found, _ = measured(parameters, pieces, "sum_of_norms").read()
    assert found.norm == pytest.approx(sum(map(math.sqrt, squares)), rel=1e-12)


@pytest.mark.parametrize("gradient_norm", ["global", "sum_of_norms"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_non_finite_gradients_set_the_flag_and_leave_no_nan_in_the_norm(parameters, gradient_norm, value):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    pieces[1].gradient[3] = value
    found, figures = measured(parameters, pieces, gradient_norm).read([[torch.tensor([7.0])]])
    assert (found.found_inf, found.norm) == (True, 0.0)
    assert figures == [[7.0]]


@pytest.mark.parametrize("gradient_norm", ["global", "sum_of_norms"])
def test_a_square_beyond_the_fp32_range_is_not_an_overflow(parameters, gradient_norm):
    pieces = [Piece(parameters[1], torch.full((5,), 1e30), 0)]
    found, _ = measured(parameters, pieces, gradient_norm, is_exact=True).read()
    assert not found.found_inf
    assert found.norm == pytest.approx(math.sqrt(5) * 1e30, rel=1e-6)


def test_a_parameter_counted_by_another_pipeline_stage_is_only_checked_for_overflow(parameters):
    parameters[1].ds_pipe_replicated = True
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    found, _ = measured(parameters, pieces).read()
    assert found.norm == pytest.approx(float(pieces[0].gradient.double().norm()), rel=1e-6)
    pieces[1].gradient[0] = math.inf
    assert measured(parameters, pieces).flag > 0


@pytest.mark.parametrize(("peers", "rank"), [((4, 5), None), ((3,), 3)])
def test_an_overflow_names_the_last_parameter_and_in_a_group_of_one_the_rank(parameters, peers, rank):
    pieces = pieces_of(parameters, torch.Generator().manual_seed(0))
    gradients = gradients_of(parameters, peers=peers)
    assert gradients.locate(pieces) is None
    for piece in pieces:
        piece.gradient[0] = math.nan
    found = gradients.locate(pieces)
    assert (found.tensor, found.rank, found.num_tensors, found.num_gradients) == ("p1", rank, 2, 3)
    assert found.ranks == peers


def test_pieces_get_the_same_regularizer_gradients_as_full_weights():
    torch.manual_seed(0)
    layers = {"a": torch.nn.Linear(4, 6), "b": torch.nn.Linear(6, 3)}
    settings = RegularizerSettings(strength=0.5, epsilon=1e-2)
    whole = DualRangeRegularizer(layers, settings)
    whole.add_gradients(8.0)
    in_pieces = DualRangeRegularizer(layers, settings)
    adding = PieceRegularizer(in_pieces)
    pieces = []
    for layer in layers.values():
        numel = layer.weight.numel()
        for start, end in ((0, 5), (5, numel)):
            pieces.append(Piece(layer.weight, torch.zeros(end - start), start))
        pieces.append(Piece(layer.bias, torch.zeros(layer.bias.numel()), 0))
    adding.add_gradients(pieces, 8.0, group=None, device=torch.device("cpu"))
    for piece in pieces:
        expected = torch.zeros(piece.gradient.numel())
        if piece.parameter.ndim == 2:
            expected = piece.parameter.grad.flatten()[piece.start : piece.start + piece.gradient.numel()]
        assert torch.equal(piece.gradient, expected)
    assert float(in_pieces.value) == pytest.approx(float(whole.value), rel=1e-12)
