import pytest
import torch
from tiny_models import KINDS, tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.layers.conversion.convert import bit_layers, convert


def gpt2(blocks=4):
    sizes = {"n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_layer=blocks, bos_token_id=0, eos_token_id=0))


class Stack(nn.Module):
    """Blocks of no known family, with lists inside and beside them that are none."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(4, 16), nn.Embedding(4, 16)])
        self.stages = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])})
            for _ in range(blocks)
        )
        self.out = nn.Linear(16, 4)


def block_numbers(names, prefix):
    return sorted({int(name.removeprefix(prefix).split(".")[0]) for name in names})


def recipe(**changes):
    return {"base": "nvfp4", **changes}


@pytest.mark.parametrize(
    ("changes", "swapped"),
    [
        ({"keep_first": 1}, [1, 2, 3]),
        ({"keep_last": 2}, [0, 1]),
        ({"keep_first": 1, "keep_last": 1}, [1, 2]),
        ({"keep_last": 0.15}, [0, 1, 2]),  # 0.6 blocks, rounded up
        ({"keep_first": 0.25, "keep_last": 0.5}, [1]),
        ({"keep_first": 1e-12}, [1, 2, 3]),  # a share above none keeps one
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_last_blocks_are_kept(kind, changes, swapped):
    model, prefix = tiny_model(kind, num_layers=4), f"{family(kind).blocks}."
    report = convert(model, recipe(**changes))
    assert block_numbers(bit_layers(model), prefix) == swapped
    kept = [each.name for each in report.kept if each.name.startswith(prefix)]
    assert block_numbers(kept, prefix) == [n for n in range(4) if n not in swapped]


def test_the_report_says_which_end_a_kept_layer_is_at():
    report = convert(gpt2(5), recipe(keep_first=1, keep_last=2))
    reasons = {each.name: each.reason for each in report.kept}
    assert reasons["transformer.h.0.mlp.c_fc"] == "in the first block"
    assert reasons["transformer.h.3.attn.c_attn"] == "among the last 2 blocks"
    assert reasons["transformer.h.4.mlp.c_proj"] == "among the last 2 blocks"
    assert reasons["lm_head"] == "output head"


def test_a_share_that_is_a_whole_number_of_blocks_is_not_rounded_up():
    model = Stack(100)  # 0.07 · 100 is 7.000000000000001 in floating point
    convert(model, recipe(keep_first=0.07))
    assert block_numbers((n for n in bit_layers(model) if n.startswith("stages.")), "stages.")[0] == 7


def test_patterns_and_blocks_add_up():
    report = convert(gpt2(), recipe(keep=["transformer.h.*.mlp"], keep_last=1))
    reasons = {each.name: each.reason for each in report.kept}
    assert reasons["transformer.h.3.mlp.c_fc"] == "named by the recipe's keep"
    assert reasons["transformer.h.3.attn.c_attn"] == "in the last block"
    assert len(report.swapped) == 6


def test_blocks_are_the_outermost_list_with_linear_layers():
    model = Stack()
    convert(model, recipe(keep_first=1, keep_last=1))
    assert list(bit_layers(model)) == ["stages.1.experts.0", "stages.1.experts.1", "out"]


def test_in_a_list_of_linear_layers_each_layer_is_a_block():
    model = nn.ModuleDict(
        {"body": nn.ModuleList([nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()])}
    )
    report = convert(model, recipe(keep_last=1))
    assert list(bit_layers(model)) == ["body.0"]
    assert [(each.name, each.reason) for each in report.kept] == [("body.2", "in the last block")]


def test_a_block_registered_twice_is_recognised():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))
            self.last = blocks[2]  # its layers are named after this
            self.blocks = blocks

    model = Aliased()
    convert(model, recipe(keep_last=1))
    assert set(bit_layers(model)) == {"blocks.0.0", "blocks.1.0"}
    assert type(model.last[0]) is nn.Linear


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            nn.Sequential(nn.Linear(16, 16)),
            {"keep_last": 1},
            "Sequential has no nn.ModuleList .*recipe's keep",
        ),
        (
            nn.ModuleDict(
                {
                    name: nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
                    for name in ("encoder", "decoder")
                }
            ),
            {"keep_first": 1},
            r"several lists of blocks \('encoder', 'decoder'\): name the layers in the recipe's keep",
        ),
        (Stack(), {"keep_first": 2, "keep_last": 1}, "first 2 and the last 1 of the 3 blocks of Stack"),
        (Stack(), {"keep_last": 7}, "lower keep_first or keep_last"),
        (Stack(), {"keep_first": 0.5, "keep_last": 0.1}, "first 2 and the last 1 of the 3"),
    ],
)
def test_keep_settings_that_are_not_possible_are_rejected_and_nothing_is_converted(model, changes, message):
    with pytest.raises(UserError, match=message):
        convert(model, recipe(**changes))
    assert not bit_layers(model)


def test_a_model_with_kept_blocks_computes_those_exactly_as_before():
    torch.manual_seed(0)
    model, ids = gpt2(2).eval(), torch.arange(16).view(1, 16)
    inputs = []
    model.transformer.h[1].register_forward_hook(lambda _, args, output: inputs.append((args[0], output)))
    expected = model(ids).logits
    convert(model, recipe(keep_first=1))
    seen = []
    model.transformer.h[0].register_forward_hook(lambda _, args, output: seen.append(output))
    got = model(ids).logits
    first = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert torch.equal(first, inputs[0][0])  # the first block's output is untouched
    assert not torch.equal(got, expected)
