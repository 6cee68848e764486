import pytest
import torch

from megalowbit.engine.zero.measure import Piece
from megalowbit.engine.zero.regularizer import PieceRegularizer
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.layers.settings import RegularizerSettings


def test_pieces_get_what_whole_weights_get():
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
