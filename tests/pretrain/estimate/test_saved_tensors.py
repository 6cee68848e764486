from types import SimpleNamespace

import pytest
import torch
from tiny_models import KINDS, tiny_model

from megalowbit.engine.pipeline.parts import parts_of
from megalowbit.families.registry import family
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.estimate import saved_tensors
from megalowbit.pretrain.estimate.saved_tensors import (
    LargestRecipes,
    largest_recipes,
    saved_by_stage,
    saved_for_backward,
)
from megalowbit.speculation.settings import SpeculationSettings


def test_a_storage_counts_once_and_parameters_do_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, input_ids, labels):
            x = self.weight.exp()  # kept as its own result, and by the product
            return type("Output", (), {"loss": (x * x).sum()})

    assert saved_for_backward(Model(), 1, 4) == 8 * 4


class SharedInput(torch.nn.Module):
    """Two layers that multiply the same tensor, and one that multiplies what a sigmoid keeps anyway."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, input_ids, labels):
        hidden = torch.zeros(*labels.shape, 64, dtype=torch.bfloat16, requires_grad=True) + 1
        first, second, third = self.layers
        kept = (first(hidden) + second(hidden)).sigmoid()
        return SimpleNamespace(loss=third(kept).sum(), logits=input_ids)


def test_layers_with_a_choice_of_recipes_are_sized_by_the_largest():
    model = SharedInput().bfloat16()
    convert(model, "nvfp4")
    codes = recipe({"base": "fp8", "q_backward_weight": "fp32"})
    raw = recipe({"base": "fp8", "q_backward_weight": "fp32", "q_backward_input": "fp32"})
    one = 2 * 16 * 64
    # two bytes an element of the shared tensor and of the sigmoid's; codes with a scale on top of each
    most = saved_for_backward(model, 2, 16, LargestRecipes(input_unsaved=raw, input_saved=codes))
    assert most == (2 * one) + (one + 4) + (2 * one) + (one + 4)
    assert (
        saved_for_backward(model, 2, 16, LargestRecipes(input_unsaved=raw, input_saved=raw))
        == 2 * one + 2 * one
    )
    assert saved_for_backward(
        model, 2, 16, LargestRecipes(input_unsaved=codes, input_saved=codes)
    ) == 2 * one + 3 * (one + 4)
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_layers_with_a_choice_of_precisions_keep_what_their_own_recipe_leaves_alone():
    fields = {"base": "fp8", "q_backward_weight": "fp32"}
    whole = recipe({**fields, "layers": {"layers.2": {"q_backward_input": "fp32"}}})
    largest = largest_recipes(SpeculationSettings(candidates=["fp8", "bf16"]), whole)
    model = SharedInput().bfloat16()
    convert(model, whole)
    one = 2 * 16 * 64
    # as above, but the third layer makes no codes of what the sigmoid keeps
    assert saved_for_backward(model, 2, 16, largest) == (2 * one) + (one + 4) + (2 * one)


@pytest.fixture(params=["nvfp4", "metis-nvfp4", "one block in other precision"])
def blocks_and_model(request, kind):
    dropout = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if kind == "gpt2" else {}
    model = tiny_model(kind, num_layers=6, **dropout).bfloat16()
    blocks = list(model.get_submodule(family(kind).blocks).children())
    if request.param in ("nvfp4", "metis-nvfp4"):
        convert(model, request.param)
    else:
        convert(blocks[3], "mxfp4")
    return blocks, model


def counted_calls(blocks):
    calls = [0] * len(blocks)

    def count(index):
        def hook(*_):
            calls[index] += 1

        return hook

    for index, block in enumerate(blocks):
        last = [module for module in block.modules() if not list(module.children())][-1]
        last.register_forward_hook(count(index))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_identical_blocks_are_counted_as_if_each_had_run(kind, blocks_and_model):
    blocks, model = blocks_and_model
    expected = saved_for_backward(model, 2, 16)
    calls = counted_calls(blocks)
    assert saved_for_backward(model, 2, 16, blocks=blocks) == expected
    assert calls[:2] == [1, 1]
    assert 1 < sum(calls) < len(blocks)
    assert all("forward" not in vars(block) for block in blocks)


def test_blocks_with_and_without_a_window_are_counted_separately():
    """They keep a mask."""
    model = tiny_model("qwen3", num_layers=6, max_window_layers=3)
    blocks = list(model.model.layers)
    expected = saved_for_backward(model, 2, 16)
    assert saved_for_backward(tiny_model("qwen3", num_layers=6, max_window_layers=6), 2, 16) < expected
    calls = counted_calls(blocks)
    assert saved_for_backward(model, 2, 16, blocks=blocks) == expected
    assert calls == [1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_count_identical_blocks_as_if_each_had_run(kind, blocks_and_model, monkeypatch):
    blocks, model = blocks_and_model
    parts = parts_of(model)
    shape = {"micro_batch_size": 2, "sequence_length": 16, "interval": 0, "num_in_flight": 1}
    calls = counted_calls(blocks)
    found = saved_by_stage(model, parts, **shape)
    assert 1 < sum(calls) < len(blocks)
    monkeypatch.setattr(saved_tensors, "_kind", lambda block: f"{id(block)}")
    assert saved_by_stage(model, parts, **shape) == found
    assert min(calls) == 1
