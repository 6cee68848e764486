"""The damage that quantised layers do, against gradients in float64 sums of an independent loop."""

import pytest
import torch
from tiny_models import tiny_config

from megalowbit.errors import UserError
from megalowbit.hf.model import random_model
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.sweep.layer_damage import (
    assign,
    check_text,
    measured,
    sequence_losses,
    split_into_sequences,
)

LENGTH = 16
LAYER = "transformer.h.0.mlp.c_fc"


@pytest.fixture
def model():
    return random_model(tiny_config("gpt2"), seed=3).eval()


@pytest.fixture
def sequences():
    """Eight batches."""
    tokens = torch.randint(0, 64, (8 * 16 * LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    return split_into_sequences(tokens, LENGTH, "gradient")


@pytest.mark.parametrize("base", ["nvfp4", "mxfp4"])
def test_the_error_of_the_gradient_is_that_of_all_parameters_with_an_exact_forward(model, sequences, base):
    exact = gradients(model, sequences, None)
    block = {"base": base, "q_forward_input": "fp32", "q_forward_weight": "fp32"}
    noisy = gradients(model, sequences, {"base": "bf16", "layers": {LAYER: block}})
    shares = []
    for one, other in zip(exact, noisy, strict=True):
        error = sum((other[key] - one[key]).square().sum() for key in one)
        shares.append((error / sum(each.square().sum() for each in one.values())).item())
    convert(model, "nvfp4", seed=0, rank=0)
    found, loss = measured(model, [{LAYER: recipe(base)}, {}], sequences, "gradient")
    assert found.shape == (2, 8)
    assert found.dtype == torch.float64
    # gradients are rounded stochastically, with other numbers in the two computations
    assert found[0].mean().item() == pytest.approx(sum(shares) / 8, rel=0.2)
    assert 1e-5 < found[0].mean() < 0.1
    assert found[1].tolist() == [0.0] * 8
    assert loss == pytest.approx(sequence_losses(model, sequences).mean().item())


def gradients(model, sequences, chosen):
    """For each batch of 16 sequences, the gradient of each parameter in float64."""
    if chosen is not None:
        convert(model, chosen, seed=5, rank=0)
    found, layers = [], bit_layers(model)
    for part in sequences.split(16):
        logits = model(input_ids=part[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()).backward()
        one = {}
        for key, parameter in model.named_parameters():
            layer = layers.get(key.rpartition(".")[0])
            is_turned = layer is not None and layer.is_transposed and key.endswith("weight")
            one[key] = (parameter.grad.t() if is_turned else parameter.grad).double().clone()
        found.append(one)
        model.zero_grad()
    if chosen is not None:
        restore(model)
    return found


def test_quantising_twice_gives_the_same_losses_although_directions_are_kept(model, sequences):
    convert(model, "metis-qb", seed=0, rank=0)
    own = {name: layer.recipe for name, layer in bit_layers(model).items()}
    assert own[LAYER].split_input is not None or own[LAYER].split_weight is not None
    calls = []
    found, _ = measured(model, [own, {}, own], sequences, "loss", lambda *numbers: calls.append(numbers))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(found[0], found[2])
    assert found[1].abs().max() == 0
    assert found[0].abs().max() > 0


def test_layers_without_a_recipe_quantise_nothing(model, sequences):
    plain = sequence_losses(model, sequences)
    convert(model, "nvfp4", seed=0, rank=0)
    assert not torch.equal(sequence_losses(model, sequences), plain)
    assign(model, {})
    assert torch.equal(sequence_losses(model, sequences), plain)
    assign(model, {LAYER: recipe("mxfp4")})
    assert {name for name, layer in bit_layers(model).items() if layer.recipe.quantizes} == {LAYER}


def test_no_training_mode_is_left_behind_and_no_gradient(model, sequences):
    convert(model, "metis-qb", seed=0, rank=0)
    layers = bit_layers(model)
    modes = {True: set(), False: set()}  # in a forward: of low-bit layers, of other modules
    for each in model.modules():
        is_layer = each in layers.values()
        each.register_forward_pre_hook(lambda module, _, key=is_layer: modes[key].add(module.training))
    calls = []
    progress = lambda *numbers: calls.append(numbers)  # noqa: E731
    measured(model, [{LAYER: recipe("metis-qb")}], sequences[:16], "gradient", progress)
    assert calls == [(1, 1)]
    assert modes == {True: {False, True}, False: {False}}  # the loss is evaluated
    assert not any(each.training for each in model.modules())
    assert all(each.grad is None for each in model.parameters())
    assert not any(each.split_states for each in layers.values())


def test_texts_that_do_not_fit_are_refused(model):
    assert split_into_sequences(torch.arange(33), 4, "loss").tolist()[1] == [4, 5, 6, 7, 8]
    with pytest.raises(UserError, match="32 tokens, 7 sequences of 4: give at least 8"):
        split_into_sequences(torch.arange(32), 4, "loss")
    with pytest.raises(UserError, match="33 tokens, 8 sequences of 4: give at least 128"):
        split_into_sequences(torch.arange(33), 4, "gradient")
    check_text(model, torch.tensor([63]), 8)
    with pytest.raises(UserError, match="65"):
        check_text(model, torch.tensor([64]), 8)
