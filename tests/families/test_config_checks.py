import pytest
from tiny_models import tiny_config
from transformers import GPT2Config, LlamaConfig

from megalowbit.errors import UserError
from megalowbit.families.config_checks import check_config, check_fits

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
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer must be a whole number ≥ 1, not 0"),
        ({"n_embd": -16}, "n_embd must be a whole number ≥ 1, not -16"),
        ({"n_layer": 99999999999}, "n_layer 99999999999 is larger than in any model: the maximum is 10000"),
        ({"n_embd": 2**21}, "n_embd 2097152 is larger than in any model"),
        ({"n_head": 2**17}, "n_head 131072 is larger than in any model"),
        ({"vocab_size": 2**29}, "vocab_size 536870912 is larger than in any model"),
        ({"n_positions": 2**27}, "n_positions 134217728 is larger than in any model"),
        ({"n_inner": 10**12}, "n_inner 1000000000000 is larger than in any model"),
        ({"n_inner": 0}, "n_inner must be a whole number ≥ 1, not 0"),
        ({"n_inner": -7}, "n_inner must be a whole number ≥ 1, not -7"),
        ({"initializer_range": -1.0}, "initializer_range must be a number > 0, at most 10, not -1"),
        ({"initializer_range": 11.0}, "initializer_range must be a number > 0, at most 10, not 11"),
        ({"initializer_range": float("nan")}, "initializer_range must be a number > 0"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be a number > 0, at most 1, not 0"),
        ({"eos_token_id": 99999}, "eos_token_id 99999 is outside vocab_size 64"),
        ({"eos_token_id": -5}, "eos_token_id -5 is outside vocab_size 64"),
        ({"eos_token_id": [0, 64]}, "eos_token_id 64 is outside vocab_size 64"),
        ({"bos_token_id": 64}, "bos_token_id 64 is outside vocab_size 64"),
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
        ({"intermediate_size": 10**12}, "intermediate_size 1000000000000 is larger than in any model"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers 10001 is larger than in any model"),
        ({"hidden_act": "swish!"}, "unknown hidden_act"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number > 0"),
        ({"rope_theta": 0.0}, "rope_theta must be a number > 0, at most 1e[+]12, not 0"),
        ({"rope_theta": "far"}, "rope_theta must be a number > 0, at most 1e[+]12, not 'far'"),
    ],
)
def test_an_impossible_llama_is_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message):
        check_config(LlamaConfig.from_dict({**SMALL_LLAMA, **change}), "x.json")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number ≥ 1, not 0"),
        ("mistral", {"num_key_value_heads": 3}, "3 does not divide 4"),
        ("mistral", {"hidden_size": 34, "num_heads": 4}, "num_attention_heads 4 must divide hidden_size 34"),
        ("qwen3", {"head_dim": 0}, "head_dim must be a whole number ≥ 1, not 0"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "unknown kind in layer_types 'chunked_attention': .*known: full_attention, sliding_attention",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False},
            'layer_types has "sliding_attention" but sliding_window is null: set it to a size',
        ),
    ],
)
def test_attention_that_blocks_do_not_support_is_rejected_in_one_line(kind, change, message):
    with pytest.raises(UserError, match=message) as caught:
        check_config(tiny_config(kind, **change), "x.json")
    assert "\n" not in str(caught.value)


def test_windows_may_be_left_out_and_heads_be_of_any_width():
    check_config(tiny_config("mistral", sliding_window=None), "x.json")
    check_config(tiny_config("qwen3", use_sliding_window=False), "x.json")
    check_config(tiny_config("qwen3", hidden_size=34), "x.json")  # four heads of 16


def test_a_gpt2_of_another_vocabulary_may_leave_its_end_of_text_unsaid():
    for tokens in ({}, {"eos_token_id": [0, 63], "bos_token_id": None}):
        assert check_config(GPT2Config(**SMALL_GPT2, **tokens), "x.json") is None


def test_data_that_the_model_cannot_read_is_refused():
    config = LlamaConfig(**SMALL_LLAMA)
    check_fits(config, vocab_size=64, sequence_length=32)
    with pytest.raises(UserError, match="tokenizer has 65 tokens, the model's vocab_size is only 64"):
        check_fits(config, vocab_size=65, sequence_length=32)
    with pytest.raises(
        UserError, match="sequence_length 33 is longer than the model's max_position_embeddings 32"
    ):
        check_fits(config, vocab_size=64, sequence_length=33)
