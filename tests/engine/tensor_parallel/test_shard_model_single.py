import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.tensor_parallel.shard_model import SimulatedGroup, keep_first_shard
from megalowbit.errors import UserError


def model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=4))


def test_projections_are_sharded_and_everything_else_is_not():
    whole, shard = model(), model()
    keep_first_shard(shard, 4)
    cut = {name: tuple(p.shape) for name, p in shard.named_parameters()}
    assert cut["transformer.h.0.attn.c_attn.weight"] == (24, 32)
    assert cut["transformer.h.0.attn.c_attn.bias"] == (24,)
    assert cut["transformer.h.0.attn.c_proj.weight"] == (32, 8)
    assert cut["transformer.h.0.attn.c_proj.bias"] == (32,)
    assert cut["transformer.h.0.mlp.c_fc.weight"] == (32, 32)
    rest = {name: tuple(p.shape) for name, p in whole.named_parameters() if ".c_" not in name}
    assert rest == {name: cut[name] for name in rest}
    tokens = torch.zeros(1, 8, dtype=torch.long)
    shard(input_ids=tokens, labels=tokens).loss.backward()  # the shapes are consistent


def test_a_model_that_cannot_be_sharded_is_rejected_without_a_process_group():
    with pytest.raises(UserError, match="does not divide the model's n_head 4"):
        keep_first_shard(model(), 3)


def test_a_simulated_group_returns_its_own_tensor():
    group, values = SimulatedGroup(2), torch.ones(3)
    assert (group.rank, group.size, len(group.gather(values))) == (0, 2, 2)
    assert group.sum(values) is values
    assert group.largest(values) is values
