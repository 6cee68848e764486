"""Spectra against numpy's, and rounded weights against the quantizer and the forward."""

import numpy as np
import pytest
import torch
from torch import nn

from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.weight_spectra import rounded_weight, weight_spectra
from megalowbit.quantize.names import quantizer


def model(recipe, *, bias=True):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 48, bias=bias), nn.GELU(), nn.Linear(48, 32, bias=bias))
    convert(made, recipe)
    return made


def test_spectra_are_those_of_numpy():
    converted = model("nvfp4")
    weights = {name: layer.weight.detach().double().numpy() for name, layer in bit_layers(converted).items()}
    seen = []
    found = weight_spectra(converted, lambda *each: seen.append(each))
    assert seen == [("0", 1, 2), ("2", 2, 2)]
    for each in found:
        plain = weights[each.layer]
        rounded = quantizer("nvfp4e2m1bnosr")(torch.tensor(plain, dtype=torch.float32)).double().numpy()
        assert each.shape == plain.shape
        for values, matrix in ((each.plain, plain), (each.rounded, rounded), (each.error, rounded - plain)):
            expected = np.linalg.svd(matrix, compute_uv=False)
            assert values.numpy() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "metis-nvfp4"])
def test_the_rounded_weight_is_the_one_that_the_forward_multiplies_with(recipe):
    converted = model({"base": recipe, "q_forward_input": "fp32", "split_input": None}, bias=False)
    layer = bit_layers(converted)["0"]
    input = torch.randn(8, 32)
    with torch.no_grad():
        expected = layer.eval()(input)
    assert input @ rounded_weight(layer).T == pytest.approx(expected, rel=1e-5, abs=1e-5)
