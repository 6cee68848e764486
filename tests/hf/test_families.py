import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from megalowbit.errors import UserError
from megalowbit.hf.families import (
    FAMILIES,
    check_config,
    check_fits,
    expected_projections,
    family,
    position_limit,
)

SMALL_GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
SMALL_LLAMA = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(GPT2LMHeadModel, GPT2Config(**SMALL_GPT2)), (LlamaForCausalLM, LlamaConfig(**SMALL_LLAMA))],
)
def test_the_table_names_every_projection_of_the_real_model_and_nothing_else(model_class, config):
    with torch.device("meta"):
        model = model_class(config)
    row = family(config.model_type)
    inside = {
        name
        for name, module in model.get_submodule(row.blocks).named_modules(prefix=row.blocks)
        if isinstance(module, nn.Linear | Conv1D)
    }
    assert set(expected_projections(config)) == inside
    assert len(expected_projections(config)) == 3 * len(row.projections)
    assert (row.load_model_class(), row.load_config_class()) == (model_class, type(config))
    assert position_limit(config) == 32


def test_every_field_of_the_table_exists_in_its_configuration():
    for row in FAMILIES:
        config = row.load_config_class()()
        for field in (row.num_layers, row.hidden_size, row.num_heads, row.position_limit, row.activation):
            assert hasattr(config, field)
        for field in (*row.sizes, *row.dropouts):
            assert hasattr(config, field)
        check_config(config, "defaults")


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"unknown model_type 'lama': did you mean 'llama'\? known: gpt2, llama"
    ):
        family("lama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer must be a whole number ≥ 1, not 0"),
        ({"n_embd": -16}, "n_embd must be a whole number ≥ 1, not -16"),
        ({"n_head": 3}, "n_head 3 must divide n_embd 16"),
        ({"resid_pdrop": 1.5}, "resid_pdrop must be a probability, 0 … 1, not 1.5"),
        (
            {"activation_function": "gelu_mew"},
            "unknown activation_function 'gelu_mew': did you mean 'gelu_new'",
        ),
        ({"pad_token_id": 64}, "pad_token_id 64 is outside vocab_size 64"),
    ],
)
def test_an_impossible_gpt2_is_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message) as caught:
        check_config(GPT2Config(**{**SMALL_GPT2, **change}), "x.json")
    assert str(caught.value).startswith("x.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 0}, "intermediate_size must be a whole number ≥ 1"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads must divide num_attention_heads: 3 does not divide 4",
        ),
        ({"hidden_act": "swish!"}, "unknown hidden_act"),
    ],
)
def test_an_impossible_llama_is_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message):
        check_config(LlamaConfig(**{**SMALL_LLAMA, **change}), "x.json")


def test_data_that_the_model_cannot_read_is_refused():
    config = LlamaConfig(**SMALL_LLAMA)
    check_fits(config, vocab_size=64, sequence_length=32)
    with pytest.raises(UserError, match="tokenizer has 65 tokens, the model's vocab_size is only 64"):
        check_fits(config, vocab_size=65, sequence_length=32)
    with pytest.raises(
        UserError, match="sequence_length 33 is longer than the model's max_position_embeddings 32"
    ):
        check_fits(config, vocab_size=64, sequence_length=33)
