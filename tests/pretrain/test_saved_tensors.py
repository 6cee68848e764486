from types import SimpleNamespace

import torch

from megalowbit.layers.recipe import recipe
from megalowbit.layers.surgery import convert
from megalowbit.pretrain.saved_tensors import LargestForms, saved_for_backward


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


def test_of_a_choice_of_recipes_layers_are_counted_with_the_one_that_keeps_more():
    model = SharedInput().bfloat16()
    convert(model, "nvfp4")
    codes = recipe({"base": "fp8", "q_backward_weight": "fp32"})
    raw = recipe({"base": "fp8", "q_backward_weight": "fp32", "q_backward_input": "fp32"})
    one = 2 * 16 * 64
    # two bytes an element of the shared tensor and of the sigmoid's; codes with a scale on top of each
    most = saved_for_backward(model, 2, 16, LargestForms(own=raw, beside=codes))
    assert most == (2 * one) + (one + 4) + (2 * one) + (one + 4)
    assert saved_for_backward(model, 2, 16, LargestForms(own=raw, beside=raw)) == 2 * one + 2 * one
    assert saved_for_backward(model, 2, 16, LargestForms(own=codes, beside=codes)) == 2 * one + 3 * (one + 4)
    assert not any(layer._forward_pre_hooks for layer in model.layers)
