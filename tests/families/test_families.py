"""Each family as a whole: what conversion makes of its model, in numbers of transformers' own."""

import copy

import pytest
import torch
from tiny_models import KINDS, tiny_model
from transformers.pytorch_utils import Conv1D

from megalowbit.families.registry import family
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.recipe import recipe

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 64


def losses_and_gradients(model):
    output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    gradients = {
        name: parameter.grad.t() if name in transposed else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return output.loss.detach(), output.logits.detach(), gradients


@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_layers_without_quantising_compute_what_transformers_does(kind):
    model = tiny_model(kind, num_layers=3)
    converted = copy.deepcopy(model)
    convert(converted, "nvfp4")
    for layer in bit_layers(converted).values():
        layer.recipe = recipe("bf16")  # which quantises nothing
    expected, found = losses_and_gradients(model), losses_and_gradients(converted)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, expected[2][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_finds_all_projections_and_is_undone_without_a_trace(kind):
    model = tiny_model(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model(TOKENS).logits
    report = convert(model, "nvfp4")
    assert list(bit_layers(model)) == family(kind).projection_names(model.config)
    assert [(each.name, each.reason) for each in report.kept] == [("lm_head", "output head")]
    with torch.no_grad():
        low_bit = model(TOKENS).logits
    assert 1e-3 < (low_bit - logits).norm() / logits.norm() < 0.5
    restore(model)
    assert {name: type(module) for name, module in model.named_modules()} == {
        name: type(module) for name, module in tiny_model(kind).named_modules()
    }
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert model(TOKENS).logits.equal(logits)
