from torch import nn
from transformers.pytorch_utils import Conv1D

from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.conversion.kept_layers import is_linear, linear_layers, output_heads, reasons_to_keep
from megalowbit.layers.recipe import recipe


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(Conv1D(16, 16), nn.Linear(16, 16)), nn.Linear(16, 4)

    def get_output_embeddings(self):
        return self.head


def test_linear_layers_are_found_before_and_after_conversion():
    model = Headed()
    assert list(linear_layers(model)) == ["body.0", "body.1", "head"]
    convert(model)
    assert list(linear_layers(model)) == ["body.0", "body.1", "head"]
    assert not is_linear(nn.Conv1d(1, 1, 1))


def test_kept_heads_have_a_reason_and_swapped_layers_have_none():
    model = Headed()
    assert output_heads(model) == {id(model.head)}
    assert reasons_to_keep(model, linear_layers(model), recipe("nvfp4"), {}) == {"head": "output head"}
