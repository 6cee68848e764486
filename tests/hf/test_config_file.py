import pytest
from transformers import GPT2Config, LlamaConfig

from megalowbit.errors import UserError
from megalowbit.hf.config_file import config_from_dict
from megalowbit.json_text import read_json_object

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64}
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config", [GPT2Config(n_layer=3, resid_pdrop=0.25), LlamaConfig(num_hidden_layers=3)]
)
def test_what_transformers_saved_is_read_back_equal(tmp_path, config):
    config.save_pretrained(tmp_path)
    raw = read_json_object(tmp_path / "config.json")
    assert config_from_dict(raw, {}, "x", is_strict=True).to_dict() == type(config).from_dict(raw).to_dict()


def test_overrides_replace_fields_by_their_own_or_their_common_name():
    config = config_from_dict(GPT2, {"n_layer": 5, "hidden_size": 32, "resid_pdrop": 0.0}, "x")
    assert (config.n_layer, config.n_embd, config.resid_pdrop) == (5, 32, 0.0)
    assert config_from_dict(LLAMA, {"rope_theta": 5e5}, "x").rope_parameters["rope_theta"] == 5e5


def test_a_field_with_a_slip_of_the_pen_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"x\.json: unknown field 'n_layers': did you mean 'n_layer'\?"):
        config_from_dict({**GPT2, "n_layers": 2}, {}, "x.json", is_strict=True)
    with pytest.raises(UserError, match=r"model\.overrides 'num_layers': did you mean 'n_layer'\?"):
        config_from_dict(GPT2, {"num_layers": 2}, "x.json")
    with pytest.raises(UserError, match=r"unknown field in model\.overrides 'n_ctx'"):
        config_from_dict(GPT2, {"n_ctx": 2}, "x.json")  # transformers would ignore it


def test_a_program_may_have_written_fields_of_another_version():
    assert config_from_dict({**GPT2, "some_new_switch": True}, {}, "x").n_layer == 2
    assert (
        config_from_dict({**GPT2, "n_ctx": 1024, "torch_dtype": "float16"}, {}, "x", is_strict=True).n_layer
        == 2
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"n_layer": 2}, 'x has no "model_type": add "gpt2" or "llama"'),
        ({"model_type": "bert"}, "unknown model_type 'bert'"),
        ({**GPT2, "n_layer": "two"}, "x is not a valid gpt2 configuration: .*n_layer"),
        ({**GPT2, "n_layer": 2.5}, "x is not a valid gpt2 configuration: .*n_layer"),
        ({**GPT2, "n_embd": 17}, "n_head 2 must divide n_embd 17"),
        ({**LLAMA, "hidden_size": 17}, "x is not a valid llama configuration: .*not a multiple"),
        ({**LLAMA, "head_dim": 5}, "x is not a valid llama configuration: .*even rotary dimension"),
        ({**GPT2, "dtype": "float17"}, "x is not a valid gpt2 configuration: .*float17"),
    ],
)
def test_a_wrong_configuration_is_one_line(raw, message):
    with pytest.raises(UserError, match=message) as caught:
        config_from_dict(raw, {}, "x")
    assert "\n" not in str(caught.value)


def test_the_family_cannot_be_overridden():
    with pytest.raises(UserError, match=r"unknown field in model\.overrides 'model_type'"):
        config_from_dict(GPT2, {"model_type": "llama"}, "x")
