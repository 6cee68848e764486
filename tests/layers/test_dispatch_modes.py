"""Layers under dispatch modes: the same bits as without, the same kernels, and nothing breaks.

`FlopCounterMode` watches operations. Selective checkpointing stores some results, and returns them in place
of operations when the forward is repeated.
"""

import functools

import pytest
import torch
from recording_chooser import RecordingChooser
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert, set_chooser, set_observer
from megalowbit.quantize import reference

TOKENS, WIDTH = 32, 64
RECIPES = {
    "nvfp4": "nvfp4",
    "metis-nvfp4": "metis-nvfp4",
    "split": {"base": "nvfp4", "split_input": {"rank": 4}},
    "fp8": {"base": "mxfp4", "gemm": "fp8"},
}
LAYER = torch.ops.megalowbit.linear.default
POLICIES = {
    "layers": lambda _, operation, *__, **___: operation is LAYER,
    "everything": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    "nothing": lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
}


class Observer:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((layer, role, counts.tolist(), error.tolist()))


def trained(recipe, forward, *, chooser=None):
    """Output, gradients and counts of two micro-batches through two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)).bfloat16()
    convert(model, recipe=recipe, seed=3)
    cache_weights(model)
    observer = Observer()
    set_observer(model, observer)
    set_chooser(model, chooser)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    outputs = []
    for _ in range(2):
        outputs.append(forward(model, x))
        outputs[-1].square().sum().backward()
    assert all(layer.product_counts for layer in bit_layers(model).values())
    return [*outputs, x.grad, *(each.grad for each in model.parameters())], observer.seen


def counting(model, x, counter):
    with counter:
        return model(x)


def selective(model, x, policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def assert_same(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert found[1] == expected[1]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_counting_flops_changes_neither_bits_nor_kernels(recipe, monkeypatch):
    expected = trained(recipe, lambda model, x: model(x))
    counter = FlopCounterMode(display=False)
    uses = []
    monkeypatch.setattr(reference, "encode", uses.append)
    found = trained(recipe, functools.partial(counting, counter=counter))
    assert_same(found, expected)
    assert not uses
    if recipe == "nvfp4":
        assert counter.get_total_flops() == 2 * 2 * TOKENS * WIDTH * 128  # of the last forward: two layers


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_selective_checkpointing_does_not_change_a_bit(recipe, policy):
    expected = trained(recipe, lambda model, x: model(x))
    assert_same(trained(recipe, functools.partial(selective, policy=policy)), expected)


def test_a_layer_that_a_policy_saves_is_not_computed_again(monkeypatch):
    from megalowbit.layers import compiled

    calls = []
    products = compiled.forward_products
    monkeypatch.setattr(
        compiled, "forward_products", lambda *args, **named: calls.append(1) or products(*args, **named)
    )
    trained("nvfp4", functools.partial(selective, policy=POLICIES["layers"]))
    assert len(calls) == 2 * 2
    trained("nvfp4", functools.partial(selective, policy=POLICIES["nothing"]))
    assert len(calls) == 2 * 2 + 2 * 2 * 2


def test_a_layer_with_a_chooser_is_computed_again():
    expected = trained("nvfp4", lambda model, x: model(x), chooser=RecordingChooser())
    found = trained(
        "nvfp4", functools.partial(selective, policy=POLICIES["everything"]), chooser=RecordingChooser()
    )
    assert_same(found, expected)
