"""The module of a single stage in one process; tests/distributed/test_pipeline.py tests several."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megalowbit as mlb
from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.layers.conversion.convert import random_stream

TOKENS = torch.arange(12).reshape(2, 6)
STOCHASTIC = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b"}


def whole(*, is_tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, max_position_embeddings=8, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=is_tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_names_and_state_dict_equal_those_of_the_model():
    model = whole()
    module = pipeline_module(model, num_stages=1)
    assert module.state_dict().keys() == model.state_dict().keys()
    assert module.parameter_names() == {name: name for name, _ in model.named_parameters()}
    assert module.tied_names() == {}
    assert module.get_output_embeddings() is model.lm_head
    assert module.num_parameters_of_all_stages == sum(p.numel() for p in model.parameters())


def test_a_tied_head_is_saved_under_the_name_of_the_embedding():
    module = pipeline_module(whole(is_tied=True), num_stages=1)
    assert module.parameter_names()["lm_head.weight"] == "model.embed_tokens.weight"
    assert module.tied_names() == {"lm_head.weight": "model.embed_tokens.weight"}
    assert module.get_tied_weights_and_groups() == []


@pytest.mark.parametrize("interval", [0, 1, 2, 5])
def test_forward_equals_that_of_the_model(interval):
    model = whole()
    with torch.no_grad():
        expected = model(TOKENS).logits
    module = pipeline_module(model, num_stages=1, activation_checkpoint_interval=interval)
    assert module(TOKENS).equal(expected)


def gradients(interval):
    """Two forwards, then their backwards, in the order of the 1F1B schedule."""
    model = whole()
    mlb.convert(model, STOCHASTIC, seed=3)
    module = pipeline_module(model, num_stages=1, activation_checkpoint_interval=interval)
    stream = random_stream(module)
    losses = [module.loss_fn(module(tokens), tokens) for tokens in (TOKENS, TOKENS + 2)]
    for loss in losses:
        loss.backward()
        assert stream.step == 2
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("interval", [1, 2])
def test_recomputation_draws_the_random_numbers_of_its_forward(interval):
    for found, expected in zip(gradients(interval), gradients(0), strict=True):
        assert found.equal(expected)


def test_without_resetting_the_stream_recomputation_draws_other_random_numbers(monkeypatch):
    """Shows that the test above depends on resetting the stream."""
    expected = gradients(0)
    from contextlib import nullcontext

    from megalowbit.quantize.random_stream import RandomStream

    monkeypatch.setattr(RandomStream, "at", lambda self, step: nullcontext())
    assert not all(found.equal(each) for found, each in zip(gradients(1), expected, strict=True))


def test_a_stage_prints_nothing(capfd):
    pipeline_module(whole(), num_stages=1)
    assert capfd.readouterr().out == ""
