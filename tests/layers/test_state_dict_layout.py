"""A converted model's state dict has the names and layouts of the Hugging Face model, both ways."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.state_dict_layout import parameter_layout

IDS = torch.arange(32).view(2, 16)
SQUARE = "transformer.h.0.attn.c_proj.weight"  # the one that another layout would fit in silence
WIDE = "transformer.h.0.attn.c_attn.weight"


def gpt2(seed=0):
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config).eval()


def converted(build=gpt2, seed=0, recipe="nvfp4"):
    model = build(seed)
    convert(model, recipe)
    return model


def assert_same(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def copies(state):
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("build", [gpt2, llama])
def test_the_state_dict_of_a_converted_model_is_that_of_the_plain_one(build):
    assert_same(converted(build).state_dict(), build().state_dict())


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("options", [{}, {"assign": True}, {"strict": False}])
def test_the_state_dict_of_a_plain_model_is_loaded(build, options):
    model, other = converted(build, seed=1), build()
    result = model.load_state_dict(other.state_dict(), **options)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same(model.state_dict(), other.state_dict())
    assert all(layer.weight.is_contiguous() for layer in bit_layers(model).values())
    assert all(layer.weight.requires_grad for layer in bit_layers(model).values())
    assert torch.equal(model(IDS).logits, converted(build)(IDS).logits)


@pytest.mark.parametrize("folder_options", [{}, {"max_shard_size": "20KB"}])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_save_pretrained_of_a_converted_model_is_loaded_by_from_pretrained(tmp_path, build, folder_options):
    model = converted(build)
    model.save_pretrained(tmp_path, **folder_options)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is bool(folder_options)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(again.state_dict(), build().state_dict())
    assert torch.equal(again.eval()(IDS).logits, build()(IDS).logits)


def test_one_converted_model_loads_another():
    model, other = converted(seed=1), converted()
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    restore(other)
    assert_same(model.state_dict(), other.state_dict())


def test_tensors_of_a_state_dict_share_memory_with_the_parameters():
    model = converted()
    state = model.state_dict()
    assert not any(value.requires_grad for value in state.values())
    state[WIDE][3, 5] = 7.0
    assert model.transformer.h[0].attn.c_attn.weight[5, 3] == 7.0


def test_keep_vars_returns_tensors_with_gradients_to_the_parameters():
    model = converted()
    state = model.state_dict(keep_vars=True)
    assert_same({name: value.detach() for name, value in state.items()}, gpt2().state_dict())
    (state[SQUARE][1] * 3).sum().backward()
    grad = model.transformer.h[0].attn.c_proj.weight.grad
    assert torch.equal(grad[:, 1], torch.full((32,), 3.0))
    assert not grad[:, 0].any()


def test_prefixes_and_wrappers_keep_the_layout():
    expected = gpt2().state_dict()
    model = converted()
    assert_same(model.state_dict(prefix="a."), {f"a.{name}": value for name, value in expected.items()})
    wrapped = nn.ModuleDict({"module": model})  # as DistributedDataParallel names it
    assert_same(wrapped.state_dict(), {f"module.{name}": value for name, value in expected.items()})
    compiled = torch.compile(model)
    assert_same(compiled.state_dict(), {f"_orig_mod.{name}": value for name, value in expected.items()})
    other = torch.compile(converted(seed=1))
    other.load_state_dict(compiled.state_dict())
    assert_same(other.state_dict(), compiled.state_dict())


@pytest.mark.parametrize("take", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_layout_of_the_original(take):
    model = take(converted())
    assert_same(model.state_dict(), gpt2().state_dict())
    model.load_state_dict(gpt2(1).state_dict())
    assert_same(model.state_dict(), gpt2(1).state_dict())


def test_averaged_models_and_torchs_state_dict_functions_agree():
    averaged = AveragedModel(converted())
    averaged.update_parameters(converted())
    state = {name.removeprefix("module."): value for name, value in averaged.state_dict().items()}
    state.pop("n_averaged")
    assert_same(state, gpt2().state_dict())
    model = converted(seed=1)
    assert_same(get_model_state_dict(model), gpt2(1).state_dict())
    set_model_state_dict(model, gpt2().state_dict())
    assert_same(model.state_dict(), gpt2().state_dict())


def test_a_meta_model_is_filled_by_assignment():
    with torch.device("meta"):
        model = converted()
    assert model.state_dict()[WIDE].shape == (32, 96)
    state = copies(gpt2().state_dict())
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    assert_same(model.state_dict(), state)
    assert torch.equal(model(IDS).logits, converted()(IDS).logits)


def test_a_wrong_shape_is_reported_in_the_layout_of_the_file_and_nothing_is_loaded():
    model, state = converted(), copies(gpt2().state_dict())
    state[WIDE] = torch.zeros(5, 96)
    message = re.escape(f"size mismatch for {WIDE}: copying a param with shape torch.Size([5, 96]) ") + (
        r".*, the shape in current model is torch\.Size\(\[32, 96\]\)"
    )
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message) as raised:
            model.load_state_dict(state, strict=strict)
        assert "Missing" not in str(raised.value)
        assert "transpose" not in str(raised.value)


def test_weights_stored_as_out_by_in_are_rejected_with_the_remedy():
    model = converted()
    with parameter_layout(model):
        state = copies(model.state_dict())
    with pytest.raises(RuntimeError, match=r"c_attn\.weight.*transpose .*c_proj.* too"):
        model.load_state_dict(state)


def test_missing_and_unexpected_keys_are_reported_as_by_torch():
    model, state = converted(), copies(gpt2().state_dict())
    del state[SQUARE]
    state["transformer.h.0.attn.c_proj.other"] = torch.zeros(1)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == [SQUARE]
    assert found.unexpected_keys == ["transformer.h.0.attn.c_proj.other"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_the_callers_state_dict_is_not_changed():
    model, state = converted(), gpt2(1).state_dict()
    layer, prefix = model.transformer.h[0].attn.c_proj, SQUARE.removesuffix("weight")
    expected = copies(state)
    layer._load_from_state_dict(state, prefix, {}, False, [], [], [])  # as deepspeed.zero.Init advises
    assert_same(state, expected)
    assert torch.equal(layer.weight, state[SQUARE].t())


def test_inside_parameter_layout_state_dicts_have_the_layout_of_the_parameters():
    model, other = converted(), converted(seed=1)
    with parameter_layout(model), parameter_layout(other):
        state = model.state_dict(keep_vars=True)
        assert all(state[name] is parameter for name, parameter in model.named_parameters())
        with parameter_layout(model):
            pass
        assert model.state_dict()[WIDE].shape == (96, 32)
        other.load_state_dict(model.state_dict())
    assert model.state_dict()[WIDE].shape == (32, 96)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(KeyError), parameter_layout(model):
        raise KeyError
    assert model.state_dict()[WIDE].shape == (32, 96)


def test_the_state_dict_of_a_single_layer_has_conv1ds_layout():
    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(16, 16))
    low = copy.deepcopy(plain)
    convert(low)
    assert torch.equal(low[0].state_dict()["weight"], plain[0].weight)
    plain[0].load_state_dict(low[0].state_dict())
    low[0].load_state_dict(plain[0].state_dict())


def test_the_order_of_parameters_is_that_of_the_plain_model():
    plain, low = gpt2(), converted()
    assert [name for name, _ in low.named_parameters()] == [name for name, _ in plain.named_parameters()]
    vector = nn.utils.parameters_to_vector(low.parameters())
    other = converted(seed=1)
    nn.utils.vector_to_parameters(vector, other.parameters())
    assert_same(other.state_dict(), plain.state_dict())


def test_save_pretrained_saves_parameters_that_are_views_of_one_flat_buffer(tmp_path):
    model, plain = converted(), gpt2()
    buffer = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(buffer, model.parameters())  # views of the buffer
    model.save_pretrained(tmp_path)
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), plain.state_dict())
