"""Compared with PyTorch's FLOP counter on real models, and with formulas written out by hand."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megalowbit.families.model_flops import ModelFlops

GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied head": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "gpt2, other MLP": ("GPT2", {**GPT2, "n_inner": 40, "n_head": 2, "n_layer": 3}),
    "llama": ("Llama", LLAMA),
    "llama, grouped queries": ("Llama", {**LLAMA, "num_key_value_heads": 2}),
    "llama, one key head, tied": ("Llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen3, wide heads": ("Qwen3", {**LLAMA, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen3, tied": ("Qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
}


def build(kind, fields, device="cpu"):
    config = getattr(transformers, f"{kind}Config")(**fields)
    config._attn_implementation = "eager"  # as matrix products, which the counter sees
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with torch.device(device):
        return getattr(transformers, name)(config)


@pytest.mark.parametrize("length", [8, 24])
@pytest.mark.parametrize("name", MODELS)
def test_counted_flops_are_those_of_a_forward_and_a_backward_pass(name, length):
    model = build(*MODELS[name])
    tokens = torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert counter.get_total_flops() == 2 * length * ModelFlops.of(model, length).counted


def test_gpt2_small_by_hand():
    """124 M parameters at 1024 tokens, with Megatron's formula and PaLM's."""
    layers, hidden, vocabulary, length = 12, 768, 50257, 1024
    flops = ModelFlops.of(build("GPT2", {}, device="meta"), length)
    megatron = 72 * layers * hidden**2 * (
        1 + length / (6 * hidden) + vocabulary / (12 * layers * hidden)
    )  # fmt: skip
    assert flops.counted == pytest.approx(megatron, rel=1e-12)
    assert flops.palm == 6 * 124_439_808 + 12 * layers * 12 * 64 * length
    assert flops.counted == 854_438_400  # 0.85 GFLOP a token


def test_llama3_8b_by_hand():
    fields = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    flops = ModelFlops.of(build("Llama", fields, device="meta"), 8192)
    block = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    attention = 12 * 32 * 4096 * 8192
    assert flops.counted == 6 * (32 * block + 4096 * 128256) + attention
    assert flops.palm == 6 * 8_030_261_248 + attention


def documents_of(*lengths):
    return np.concatenate([np.arange(length) for length in lengths])


@pytest.mark.parametrize("name", ["gpt2", "llama, grouped queries", "qwen3, wide heads"])
def test_flops_of_separate_documents_are_those_of_each_alone(name):
    """Torch counts each document in a forward and backward pass without the others."""
    model, lengths = build(*MODELS[name]), (5, 1, 9, 3, 2, 4)  # two rows of 12
    total = 0
    for length in lengths:
        tokens = torch.zeros(1, length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
        total += counter.get_total_flops()
    flops = ModelFlops.of(model, 12)
    assert flops.of_documents(documents_of(*lengths).reshape(2, 12)) * 24 == pytest.approx(total, rel=1e-12)
    assert flops.of_documents(documents_of(12)) == flops.counted


def test_a_window_limits_long_documents_only():
    fields = {**LLAMA, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4}
    fields["layer_types"] = ["full_attention", "sliding_attention"]
    flops = ModelFlops.of(build("Qwen3", fields, device="meta"), 16)
    lengths = (3, 4, 9)
    pairs = sum(d * d + d * min(d, 4) for d in lengths)
    matrices = flops.counted - 12 * 32 * (16 + 4)
    assert flops.of_documents(documents_of(*lengths)) == pytest.approx(matrices + 12 * 32 * pairs / 16)


def test_a_sliding_window_limits_the_attended_positions():
    fields = {**LLAMA, "head_dim": 8, "use_sliding_window": True, "sliding_window": 16}
    fields["layer_types"] = ["full_attention", "sliding_attention"]
    model = build("Qwen3", fields, device="meta")
    short, long = ModelFlops.of(model, 16), ModelFlops.of(model, 64)
    assert long.counted - short.counted == 12 * 4 * 8 * (64 - 16)  # only the first block's grow
    assert long.palm - short.palm == 2 * 12 * 4 * 8 * (64 - 16)
