"""Projections that are in no linear layer are reported as missed, with real mixtures of experts."""

import logging

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTModel,
)

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.kept_layers import missed_weights
from megalowbit.layers.conversion.report import refuse_missed
from megalowbit.layers.recipe import recipe

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    ),
}
GATE_UP = {"mixtral": (4, 96, 32), "qwen3_moe": (4, 48, 32), "gpt_oss": (4, 32, 96)}
DOWN = {"mixtral": (4, 32, 48), "qwen3_moe": (4, 32, 24), "gpt_oss": (4, 48, 32)}
ROUTERS = {"mixtral": "gate", "qwen3_moe": "gate", "gpt_oss": "router"}
EXPERTS = {"base": "nvfp4", "keep": ["model.layers.*.mlp.experts"]}


class Experts(nn.Module):
    """Two experts in one parameter; beside it, what is no projection."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 16, 16))
        self.weight_bias = nn.Parameter(torch.zeros(2, 16))
        self.scale = nn.Parameter(torch.ones(1, 16))
        self.counts = nn.Parameter(torch.zeros(2, 16, dtype=torch.int64), requires_grad=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_emb = nn.Parameter(torch.zeros(1, 8, 16))
        self.first = nn.Linear(16, 16)
        self.experts = Experts()
        self.matrix = nn.Parameter(torch.zeros(16, 16))
        self.table = nn.Embedding(8, 16)
        self.tied = self.table.weight
        self.norm = nn.LayerNorm((4, 16))
        self.conv = nn.Conv1d(16, 16, 3)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_reported_as_missed_and_routers_as_kept(name):
    model = MODELS[name]()
    report = convert(model)
    assert len(report.swapped) == 8  # attention, and no expert
    assert [(each.name, each.shape) for each in report.missed] == [
        (f"model.layers.{block}.mlp.experts.{part}_proj", shape)
        for block in (0, 1)
        for part, shape in (("gate_up", GATE_UP[name]), ("down", DOWN[name]))
    ]
    assert "no linear layer's weight" in report.missed[0].reason
    kept = {each.name: each.reason for each in report.kept}
    routers = dict.fromkeys((f"model.layers.{n}.mlp.{ROUTERS[name]}.weight" for n in (0, 1)), "a router")
    assert kept == {"lm_head": "output head", **routers}
    text = str(report)
    assert "missed 4 weights, which stay in high precision:" in text
    assert f"model.layers.*.mlp.experts.gate_up_proj  {GATE_UP[name]}: a parameter of " in text


@pytest.mark.parametrize("name", MODELS)
def test_weights_named_by_keep_are_kept_and_not_missed(name):
    report = convert(MODELS[name](), EXPERTS)
    assert not report.missed
    reasons = [each.reason for each in report.kept if ".experts." in each.name]
    assert reasons == ["named by the recipe's keep"] * 4
    one = convert(MODELS[name](), {**EXPERTS, "keep": ["*.gate_up_proj"]})
    assert {each.name.rpartition(".")[2] for each in one.missed} == {"down_proj"}
    refuse_missed(report.missed, report.recipe)


def test_kept_blocks_have_no_missed_weights():
    report = convert(MODELS["mixtral"](), {"base": "nvfp4", "keep_first": 1})
    assert {each.name.split(".")[2] for each in report.missed} == {"1"}
    assert {each.reason for each in report.kept if ".0.mlp.experts" in each.name} == {"in the first block"}


def test_conversion_warns_once_and_a_run_rejects_missed_weights(caplog):
    with caplog.at_level(logging.WARNING):
        report = convert(MODELS["mixtral"]())
    (record,) = caplog.records
    line = (
        "recipe 'nvfp4-first-block-fp8' does not reach weight model.layers.0.mlp.experts.gate_up_proj (4, "
        "96, 32) and 3 more: a parameter of MixtralExperts, and no linear layer's weight"
    )
    assert record.getMessage() == f"{line}; it stays in high precision"
    with pytest.raises(UserError) as error:
        refuse_missed(report.missed, report.recipe)
    assert str(error.value).startswith(line)
    assert "keep ('model.layers.*.mlp.experts')" in str(error.value)


def test_a_converted_model_still_shows_what_was_missed():
    model = MODELS["mixtral"]()
    report = convert(model)
    assert missed_weights(model, report.recipe) == report.missed
    assert not missed_weights(model, recipe("bf16"))
    assert not missed_weights(model, recipe(EXPERTS))
    assert not convert(MODELS["mixtral"](), "bf16").missed


def test_only_the_matrices_of_a_hand_written_module_are_missed():
    report = convert(Net())
    assert [(each.name, each.shape) for each in report.missed] == [
        ("matrix", (16, 16)),
        ("experts.weight", (2, 16, 16)),
    ]
    assert [(each.name, each.reason) for each in report.kept] == [("conv.weight", "a convolution")]


def test_a_model_with_only_missed_weights_is_rejected_and_they_are_listed():
    with pytest.raises(
        UserError, match=r"converts no layer of Sequential \(0\.weight: a parameter of Experts"
    ):
        convert(nn.Sequential(Experts()))


def test_packed_projections_of_torchs_attention_are_missed():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "mlp": nn.Linear(16, 16)})
    assert [each.name for each in convert(model).missed] == ["attention.in_proj_weight"]


def test_parts_of_linear_layers_are_not_missed():
    model = nn.Sequential(nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    report = convert(model, {"base": "nvfp4", "parameter_split": {"rank": 2}})
    assert not report.missed
    assert list(bit_layers(model)) == ["0"]
    assert not missed_weights(model, report.recipe)


def test_patches_and_positions_of_a_vision_model_are_not_missed():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    report = convert(ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)))
    assert not report.missed
    assert "a convolution" in {each.reason for each in report.kept}


def test_shapes_are_found_on_meta_models():
    with torch.device("meta"):
        assert len(convert(MODELS["mixtral"]()).missed) == 4
