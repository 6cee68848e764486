"""Models whose layers have recipes of their own, against models whose recipes are set layer by layer."""

import copy
import io
import pickle

import pytest
import torch
from quick_cases import slow_except
from tiny_models import tiny_model
from torch import nn
from transformers import GPTJConfig, GPTJForCausalLM

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert, restore, share_inputs
from megalowbit.layers.conversion.kept_layers import keeping, missed_weights
from megalowbit.layers.conversion.precision_switch import switch_precision, switched
from megalowbit.layers.conversion.static_inputs import record_inputs, use_static_inputs
from megalowbit.layers.recipe import recipe

HADAMARD = {"base": "nvfp4", "layout": "per_gemm", "hadamard": True}
MEAN = {"split_input": {"method": "mean"}}
BLOCKS = {
    "formats": {
        "base": "nvfp4",
        "layers": {"*.h.0": "bf16", "*.mlp.*": "mxfp8", "*.attn.c_proj": {"q_forward_input": "fp32"}},
    },
    "few": {"base": "bf16", "layers": {"*.mlp.*": "nvfp4"}},
    "hadamard": {"base": HADAMARD, "layers": {"*.mlp.*": "quartet", "*.attn.c_attn": MEAN}},
    "splits": {
        "base": "metis-nvfp4",
        "layers": {"*.h.0": "hif4", "*.c_fc": "metis-seed", "*.mlp": "metis-qb"},
    },
    "positions": {"base": "nvfp4-keep-positions", "layers": {"*.mlp.*": "tetrajet-2", "*.c_attn": "fp8"}},
    "gemms": {"base": "nvfp4", "layers": {"*.mlp.*": {"base": "mxfp4", "gemm": "fp8"}}},
}
"""Recipes over a GPT-2 of three blocks."""
IDS = torch.arange(64).view(2, 32) % 60


def gpt2(block=None, *, seed=5):
    torch.manual_seed(0)
    model = tiny_model("gpt2", n_layer=3)
    report = None if block is None else convert(model, block, seed=seed, rank=0)
    return model, report


def train(model, steps=2):
    """Losses and the gradients of the last of some micro-batches, in training mode."""
    model.train()
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: each.grad.clone() for name, each in model.named_parameters()}


def assert_equal(found, expected):
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def layer_by_layer(block):
    """The same model with each layer's recipe set by hand; those that quantise nothing are kept."""
    whole = recipe(block)
    model, _ = gpt2()
    names = [name for name in dict(model.named_modules()) if name.endswith(("c_attn", "c_proj", "c_fc"))]
    own = {
        name: next((each for pattern, each in whole.layers if _matches(name, pattern)), whole.alone)
        for name in names
    }
    kept = [name for name in names if not own[name].quantizes]
    keep = {field: getattr(whole, field) for field in ("keep_first", "keep_last", "keep_if_present")}
    convert(model, {"base": "nvfp4", **keep, "keep": [*whole.keep, *kept]}, seed=5, rank=0)
    for name, layer in bit_layers(model).items():
        layer.recipe = own[name]
    return model


def _matches(name, pattern):
    """Whether a pattern of this file matches; all begin with `*` and end with a name or `.*`."""
    inner = pattern.removeprefix("*").removesuffix("*")
    return inner in f"{name}." if inner.endswith(".") else f"{inner}." in f"{name}."


@pytest.mark.parametrize("name", slow_except(("formats", "splits", "positions"), BLOCKS))
def test_layers_compute_with_their_own_recipes(name):
    model, _ = gpt2(BLOCKS[name])
    expected = layer_by_layer(BLOCKS[name])
    assert list(bit_layers(model)) == list(bit_layers(expected))
    assert_equal(train(model), train(expected))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_recipes_of_their_layers(copied):
    model, _ = gpt2(BLOCKS["splits"])
    other = copied(model)
    for name, layer in bit_layers(model).items():
        assert bit_layers(other)[name].recipe == layer.recipe
    assert_equal(train(other), train(model))


def test_state_dicts_and_restored_models_are_those_of_plain_layers(tmp_path):
    plain, _ = gpt2()
    model, _ = gpt2(BLOCKS["formats"])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    restore(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(again.state_dict()[name], value), name
    assert not bit_layers(model)


def test_the_report_names_the_recipe_of_each_layer():
    _, report = gpt2(BLOCKS["formats"])
    text = str(report)
    assert "  transformer.h.*.mlp.c_fc  Conv1D 32→128: mxfp8  × 2" in text
    assert "  transformer.h.*.attn.c_attn  Conv1D 32→96: nvfp4 with own layers  × 2" in text
    assert "  transformer.h.*.attn.c_proj  Conv1D 32→32: own q_forward_input fp32  × 2" in text
    assert "  transformer.h.0.mlp.c_proj  Conv1D: its recipe 'bf16' quantises nothing" in text


def llama(block):
    model = tiny_model("llama")
    convert(model, block, seed=5, rank=0)
    return model


SIBLINGS = {
    "formats": {"base": "nvfp4", "layers": {"*.k_proj": "mxfp8", "*.up_proj": "fp8"}},
    "backward": {
        "base": "nvfp4",
        "layers": {
            "*.k_proj": {"q_backward_input": "nvfp4e2m1b"},
            "*.v_proj": {"q_backward_input": "nvfp4e2m1b"},
        },
    },
    "splits": {"base": {"base": "nvfp4", **MEAN}, "layers": {"*.k_proj": "nvfp4", "*.v_proj": "metis-nvfp4"}},
    "signs": {"base": HADAMARD, "layers": {"*.k_proj": "quartet-2", "*.v_proj": "nvfp4"}},
    "kept": {"base": "nvfp4", "layers": {"*.q_proj": "bf16", "*.up_proj": {"q_forward_input": "nvfp4e2m1b"}}},
}


@pytest.mark.parametrize("name", slow_except(("backward", "splits", "signs"), SIBLINGS))
def test_siblings_with_several_recipes_share_only_what_is_equal(name):
    model, other = llama(SIBLINGS[name]), llama(SIBLINGS[name])
    assert any(layer.siblings for layer in bit_layers(model).values())
    share_inputs(other, is_on=False)
    assert_equal(train(model), train(other))


@pytest.mark.parametrize("scope", ["forward", "all"])
def test_a_switch_of_single_layers_is_that_of_the_recipe(scope):
    block = BLOCKS["formats"] | {"base": "metis-nvfp4"}
    model, _ = gpt2(block)
    switch_precision(model, scope)
    later = switched(recipe(block), scope)
    assert later.name.endswith(f"{scope} in high precision")
    other, _ = gpt2(block)
    for layer in bit_layers(other).values():
        layer.recipe = later
    assert_equal(train(other), train(model))


def test_a_switch_keeps_the_split_of_parameters_of_the_layers_that_still_quantise():
    forward_only = dict.fromkeys(["q_backward_input", "q_backward_weight", "q_backward_outputgrad"], "fp32")
    split = {"rank": 4, "warmup_steps": 2}
    block = {"base": "nvfp4", **forward_only, "parameter_split": split, "layers": {"*.mlp.*": "nvfp4"}}
    later = switched(recipe(block), "forward")
    assert later.of_layer("h.0.mlp.c_fc").parameter_split == recipe(block).parameter_split
    assert later.of_layer("h.0.attn.c_attn").parameter_split is None
    assert switched(recipe(block), "all").parameter_split is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"*.q_proj": "mxfp4"}, "'*.q_proj' matches no linear layer: the nearest linear layer is"),
        ({"lm_head": "mxfp4"}, "'lm_head' has no effect: lm_head is kept as it is (output head), like all"),
        (
            {"*.mlp.*": "mxfp4", "*.mlp.c_fc": "fp8"},
            "'*.mlp.c_fc' has no effect: '*.mlp.*' is before it and matches transformer.h.0.mlp.c_fc",
        ),
        ({"*.h.0": "bf16", "*": "bf16"}, "converts no layer of GPT2LMHeadModel (transformer.h.0.attn"),
    ],
)
def test_patterns_without_effect_are_refused_in_one_line(layers, message):
    with pytest.raises(UserError) as raised:
        gpt2({"base": "nvfp4", "layers": layers})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(32, 32)
        self.stacked = nn.Parameter(torch.ones(2, 32, 32))


def test_weights_outside_linear_layers_follow_the_recipes_of_their_names():
    model = Experts()
    report = convert(model, {"base": "bf16", "layers": {"projection": "nvfp4"}})
    assert [each.name for each in report.swapped] == ["projection"]
    assert [(each.name, each.reason) for each in report.kept] == [
        ("stacked", "its recipe 'bf16 with own layers' quantises nothing")
    ]
    assert not report.missed
    missed = convert(Experts(), {"base": "bf16", "layers": {"projection": "fp8", "stacked": "nvfp4"}}).missed
    assert [each.name for each in missed] == ["stacked"]


def test_missed_weights_of_a_converted_model_are_found_although_its_layers_are_converted():
    block = {"base": "nvfp4", "layers": {"projection": "mxfp8"}}
    model = Experts()
    report = convert(model, block)
    assert [each.name for each in report.missed] == ["stacked"]
    assert missed_weights(model, recipe(block)) == report.missed


def test_keeping_more_layers_removes_patterns_that_then_have_no_effect():
    block = {"base": "nvfp4", "layers": {"*.h.0": "bf16", "*.mlp.c_fc": "mxfp8", "*.attn": "fp8"}}
    model, _ = gpt2()
    narrow = keeping(model, recipe(block), [f"transformer.h.{each}.mlp.c_fc" for each in (1, 2)])
    assert [pattern for pattern, _ in narrow.layers] == ["*.h.0", "*.attn"]
    report = convert(model, narrow)
    assert {each.name.split(".", 3)[-1] for each in report.swapped} == {
        "attn.c_attn",
        "attn.c_proj",
        "mlp.c_proj",
    }


def test_static_inputs_are_recorded_as_each_layer_needs_them_and_used_by_those_that_do():
    token_scale = {"base": "nvfp4-token-scale", "split_input": None}
    own = {"*.c_fc": "metis-seed", "*.mlp.c_proj": token_scale, "*.attn.c_proj": "nvfp4"}
    model, _ = gpt2({"base": "metis-nvfp4", "layers": own})
    model.eval()
    seen, layers = {}, bit_layers(model)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.__setitem__(name, inputs[0].flatten(0, -2))
        )
    with torch.no_grad(), record_inputs(model) as ranges:
        model(input_ids=IDS)
    static = ranges.result()
    assert {name: float(each.abs().amax()) for name, each in seen.items()} == static.maxima
    assert set(static.means) == {name for name in layers if name.endswith("c_attn")}
    for name, mean in static.means.items():
        torch.testing.assert_close(mean, seen[name].double().mean(0).float())
    use_static_inputs(model, static)
    with torch.no_grad():  # metis-seed would refuse a recorded number
        assert model(input_ids=IDS).logits.isfinite().all()
    used = {name.split(".", 3)[-1] for name, layer in layers.items() if layer.static_input is not None}
    assert used == {"attn.c_attn", "attn.c_proj"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_default_has_fp8_in_the_first_block_of_a_gpt2_only(family):
    model = tiny_model(family)
    convert(model, "nvfp4-first-block-fp8")
    found = {name: layer.recipe.name for name, layer in bit_layers(model).items()}
    if family == "llama":
        assert set(found.values()) == {"nvfp4-first-block-fp8"}
    else:
        assert {name for name, each in found.items() if each == "fp8"} == {
            "transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"
        }  # fmt: skip
        assert "transformer.h.0.attn.c_attn" not in found
    rotary = GPTJForCausalLM(
        GPTJConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    )
    convert(rotary, "nvfp4-first-block-fp8")  # has blocks h.0, h.1
    assert {layer.recipe.name for layer in bit_layers(rotary).values()} == {"nvfp4-first-block-fp8"}
    alone = tiny_model("llama")
    with pytest.raises(UserError, match=r"layers pattern '\*\.h\.0' matches no linear layer"):
        convert(alone, {"base": "nvfp4", "layers": {"*.h.0": "fp8"}})
    with pytest.raises(UserError, match="has if_present, which is for recipes in layers: leave it out"):
        convert(alone, {"base": "nvfp4", "if_present": True})
