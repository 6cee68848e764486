from itertools import pairwise

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalowbit.errors import UserError
from megalowbit.hf.pipeline import (
    Block,
    BlockInputs,
    batch_limits,
    causal_loss,
    is_tied,
    parts_of,
    place,
    run_parts,
    tied_names,
)
from megalowbit.hf.pipeline_batches import BatchLimits, as_inputs_and_labels

TOKENS = torch.arange(20).reshape(2, 10) * 7 % 50
MASK = torch.ones_like(TOKENS).index_fill(1, torch.tensor([0, 1]), 0)
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)


def make(kind, **more):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, **more)
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=50, max_position_embeddings=16, hidden_size=16, intermediate_size=24,
            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **more,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    return model.eval()


def run_stages(model, inputs, cuts):
    """The parts in stages, cut before these numbers, each with its own `BlockInputs`."""
    parts = parts_of(model)
    bounds = [0, *cuts, len(parts)]
    with torch.no_grad():
        for start, stop in pairwise(bounds):
            inputs = run_parts(parts[start:stop], inputs, BlockInputs(model))
    return inputs


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 4)])
@pytest.mark.parametrize(
    ("names", "extras"),
    [((), ()), (("attention_mask",), (MASK,)), (("attention_mask", "position_ids"), (MASK, POSITIONS))],
)
def test_parts_in_stages_compute_what_the_model_does(kind, cuts, names, extras):
    model = make(kind)
    with torch.no_grad():
        expected = model(TOKENS, **dict(zip(names, extras, strict=True)), use_cache=False).logits
    found = run_stages(model, (TOKENS, *extras) if extras else TOKENS, cuts)
    assert found.equal(expected)


PACKED = torch.cat([torch.arange(6), torch.arange(4)]).expand(2, -1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("positions", [PACKED, PACKED[:1], PACKED + 3, PACKED.flip(1)])
@pytest.mark.parametrize("mask", [None, MASK, MASK.bool(), MASK * 0.5, torch.ones_like(MASK)])
def test_stages_attend_within_packed_documents_where_the_model_does(kind, attention, positions, mask):
    model = make(kind, attn_implementation=attention)
    extras = {"position_ids": positions, "attention_mask": mask}
    with torch.no_grad():
        expected = model(TOKENS, **extras, use_cache=False).logits
        across = model(TOKENS, position_ids=positions, attention_mask=torch.ones_like(MASK), use_cache=False)
    inputs, _ = as_inputs_and_labels({"input_ids": TOKENS, "labels": TOKENS, **extras})
    for cuts in ((), (1, 2, 4)):
        assert run_stages(model, inputs, cuts).equal(expected)
    # the mask matters: positions alone keep documents apart, a mask of ones does not
    assert across.logits.allclose(expected, atol=1e-3) == (mask is not None and bool(mask.all()))


def test_limits_are_those_of_the_embeddings():
    assert batch_limits(make("gpt2").config) == BatchLimits(vocabulary=50, positions=16)
    assert batch_limits(make("llama").config) == BatchLimits(vocabulary=50, positions=None)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_keys_of_all_parts_are_those_of_the_model(kind):
    model = make(kind)
    keys = [key for part in parts_of(model) for key in part.state_dict()]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(model.state_dict())


def test_parts_share_the_modules_of_the_model():
    model = make("gpt2")
    block = parts_of(model)[2]
    assert isinstance(block, Block)
    assert block.names == ("transformer.h.1",)
    assert block.get_submodule("transformer.h.1") is model.transformer.h[1]


@pytest.mark.parametrize(("kind", "expected"), [("gpt2", True), ("llama", False)])
def test_a_tied_head_is_recognised(kind, expected):
    model = make(kind)
    assert is_tied(model) is expected
    assert set(tied_names(model.config)) <= set(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_models_own_in_fp32(dtype):
    model = make("llama").to(dtype)
    labels = TOKENS.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        expected = model(TOKENS, labels=labels, use_cache=False)
    loss = causal_loss(expected.logits, labels)
    assert loss.dtype == torch.float32
    wide = torch.log_softmax(expected.logits.double()[:, :-1], 2)
    picked = [-wide[row, at, labels[row, at + 1]] for row in range(2) for at in range(9)
              if labels[row, at + 1] != -100]  # fmt: skip
    torch.testing.assert_close(loss.double(), torch.stack(picked).mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, expected.loss.float(), rtol=1e-6, atol=0)


def test_a_model_that_recomputes_by_itself_is_refused():
    model = make("gpt2")
    model.activation_checkpointing_enable()
    with pytest.raises(UserError, match=r"pipeline\.activation_checkpoint_interval"):
        parts_of(model)


def test_modules_are_placed_below_what_is_there_already():
    root, first, second = torch.nn.Module(), torch.nn.Identity(), torch.nn.Identity()
    place(root, "a.b.0", first)
    place(root, "a.b.2", second)
    assert dict(root.named_modules())["a.b.2"] is second
    assert list(root.a.b._modules) == ["0", "2"]
