"""Names and joins on small tensors with known numbers; whole checkpoints are in test_megatron."""

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.hf.importers.file_tensors import FileTensor
from megalowbit.hf.importers.megatron_names import Sizes, layer_and_part, layer_weights, outside_weights

LLAMA = Sizes(heads=4, groups=2, head_size=1, vocab_size=5, version=3.0, family="llama")


def column(*numbers):
    return FileTensor.of(torch.tensor(numbers, dtype=torch.float32)[:, None])


def ones(*shape):
    return FileTensor.of(torch.ones(shape))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", (3, "norm1.weight")),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", (3, "norm2.bias")),
        ("decoder.layers.3.self_attention.q_layernorm.weight", (3, "q_norm.weight")),
        ("language_model.transformer.layers.11.attention.query_key_value.bias", (11, "qkv.bias")),
        ("language_model.encoder.layers.0.post_attention_norm.weight", (0, "norm2.weight")),
        ("language_model.encoder.final_norm.weight", (None, "final.weight")),
        ("word_embeddings_for_head.weight", (None, "head.weight")),
        ("decoder.layers.3.mlp.linear_fc1._extra_state", None),
        ("rotary_pos_emb.inv_freq", None),
    ],
)
def test_names_of_all_generations(name, place):
    assert layer_and_part(name) == place


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.experts.linear_fc1.weight", "decoder.layers.0.mlp.router.weight"]
)
def test_experts_are_refused(name):
    with pytest.raises(UserError, match="experts are not supported"):
        layer_and_part(name)


def test_groups_of_two_ranks_are_separated():
    """Rank 0 has group 0, rank 1 group 1; a group has two queries, a key and a value of one element."""
    ranks = [column(0, 1, 20, 30), column(2, 3, 21, 31)]
    found = layer_weights(1, {"qkv.weight": ranks}, LLAMA)
    read = {name: stored.read().flatten().tolist() for name, stored in found.items()}
    assert read == {
        "model.layers.1.self_attn.q_proj.weight": [0, 1, 2, 3],
        "model.layers.1.self_attn.k_proj.weight": [20, 21],
        "model.layers.1.self_attn.v_proj.weight": [30, 31],
    }
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (2, 1)


def test_gate_and_up_of_two_ranks_are_separated():
    found = layer_weights(0, {"fc1.weight": [column(1, 2, 10, 20), column(3, 4, 30, 40)]}, LLAMA)
    assert found["model.layers.0.mlp.gate_proj.weight"].read().flatten().tolist() == [1, 2, 3, 4]
    assert found["model.layers.0.mlp.up_proj.weight"].read().flatten().tolist() == [10, 20, 30, 40]


def test_inputs_are_joined_along_columns_and_gpt2_is_transposed():
    ranks = [FileTensor.of(torch.tensor(row)) for row in ([[1.0, 2.0]], [[3.0, 4.0]])]
    assert layer_weights(0, {"fc2.weight": ranks}, LLAMA)[
        "model.layers.0.mlp.down_proj.weight"
    ].read().tolist() == [[1, 2, 3, 4]]
    gpt2 = LLAMA._replace(family="gpt2", groups=4)
    found = layer_weights(0, {"fc2.weight": ranks, "fc2.bias": [ones(1)] * 2}, gpt2)
    assert found["transformer.h.0.mlp.c_proj.weight"].read().tolist() == [[1], [2], [3], [4]]
    assert found["transformer.h.0.mlp.c_proj.bias"].read().tolist() == [1]


def test_the_padding_of_the_vocabulary_is_removed():
    found = outside_weights({"tokens.weight": [column(0, 1, 2), column(3, 4, 99)]}, LLAMA)
    assert found["model.embed_tokens.weight"].read().flatten().tolist() == [0, 1, 2, 3, 4]


def test_shapes_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"layers\.0\.qkv\.weight has shape \(5, 1\) on its ranks"):
        layer_weights(0, {"qkv.weight": [column(*range(5))]}, LLAMA)
    with pytest.raises(UserError, match="2 key and value heads on 3 tensor-parallel ranks"):
        layer_weights(0, {"qkv.weight": [column(*range(4))] * 3}, LLAMA)
    message = r"layers\.0\.norm1\.weight has different shapes on its ranks, \(2,\), \(3,\): use"
    with pytest.raises(UserError, match=message):
        layer_weights(0, {"norm1.weight": [ones(2), ones(3)]}, LLAMA)
