from itertools import pairwise

import pytest
import torch
from quick_cases import every_pair, every_value
from tiny_models import KINDS, tiny_config, tiny_model

from megalowbit.engine.pipeline.micro_batches import BatchLimits, as_inputs_and_labels
from megalowbit.engine.pipeline.parts import (
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
from megalowbit.errors import UserError
from megalowbit.families.base import FULL, SLIDING
from megalowbit.families.registry import family

TOKENS = torch.arange(20).reshape(2, 10) * 7 % 50
MASK = torch.ones_like(TOKENS).index_fill(1, torch.tensor([0, 1]), 0)
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)


SIZES = {"vocab_size": 50, "positions": 16, "hidden_size": 16, "num_layers": 3}
WITH_WINDOW = [kind for kind in KINDS if SLIDING in family(kind).attention(tiny_config(kind))]


def make(kind, **more):
    return tiny_model(kind, **SIZES, **more).eval()


def run_stages(model, inputs, cuts):
    """Run the parts in stages that begin at the indices `cuts`, each with its own `BlockInputs`."""
    parts = parts_of(model)
    bounds = [0, *cuts, len(parts)]
    for start, stop in pairwise(bounds):
        inputs = run_parts(parts[start:stop], inputs, BlockInputs(model))
    return inputs


@every_value(
    kind=KINDS,
    cuts=[(), (2,), (1, 2, 4)],
    given=[{}, {"attention_mask": MASK}, {"attention_mask": MASK, "position_ids": POSITIONS}],
)
def test_parts_in_stages_compute_the_output_of_the_model(kind, cuts, given):
    model, extras = make(kind), tuple(given.values())
    with torch.no_grad():
        expected = model(TOKENS, **given, use_cache=False).logits
        found = run_stages(model, (TOKENS, *extras) if extras else TOKENS, cuts)
    assert found.equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_loss_and_gradients_of_the_model(kind):
    model, staged = make(kind), make(kind)
    expected = model(TOKENS, attention_mask=MASK, labels=TOKENS, use_cache=False).loss
    expected.backward()
    loss = causal_loss(run_stages(staged, (TOKENS, MASK), (1, 2, 4)), TOKENS)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(staged.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", WITH_WINDOW)
@pytest.mark.parametrize("cuts", [(), (1, 2, 4)])
def test_a_stage_does_not_attend_beyond_the_window_of_its_blocks(kind, cuts):
    """Otherwise the tests above would compare models whose window is longer than their sequences."""
    model = make(kind)
    window = model.config.sliding_window
    reach = sum(window - 1 for each in family(kind).attention(model.config) if each == SLIDING)
    is_everywhere = FULL in family(kind).attention(model.config)
    tokens = torch.arange(16).view(1, 16)
    other = tokens.clone()
    other[0, 0] += 1
    with torch.no_grad():
        first, second = (run_stages(model, each, cuts)[0] for each in (tokens, other))
    differs = [not one.equal(two) for one, two in zip(first, second, strict=True)]
    assert window < TOKENS.shape[1]
    assert differs == [is_everywhere or place <= reach for place in range(16)]


PACKED = torch.cat([torch.arange(6), torch.arange(4)]).expand(2, -1)


@every_pair(
    kind=KINDS,
    attention=["eager", "sdpa"],
    positions=[PACKED, PACKED[:1], PACKED + 3, PACKED.flip(1)],
    mask=[None, MASK, MASK.bool(), MASK * 0.5, torch.ones_like(MASK)],
)
def test_stages_attend_within_packed_documents_like_the_model(kind, attention, positions, mask):
    model = make(kind, attn_implementation=attention)
    extras = {"position_ids": positions, "attention_mask": mask}
    inputs, _ = as_inputs_and_labels({"input_ids": TOKENS, "labels": TOKENS, **extras})
    with torch.no_grad():
        expected = model(TOKENS, **extras, use_cache=False).logits
        across = model(TOKENS, position_ids=positions, attention_mask=torch.ones_like(MASK), use_cache=False)
        for cuts in ((), (1, 2, 4)):
            assert run_stages(model, inputs, cuts).equal(expected)
    # the mask matters: positions alone keep documents apart, a mask of ones does not
    assert across.logits.allclose(expected, atol=1e-3) == (mask is not None and bool(mask.all()))


def test_token_and_position_limits_come_from_the_embeddings():
    assert batch_limits(make("gpt2").config) == BatchLimits(vocabulary=50, positions=16)
    assert batch_limits(make("llama").config) == BatchLimits(vocabulary=50, positions=None)


@pytest.mark.parametrize("kind", KINDS)
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
def test_the_loss_is_that_of_the_model_in_fp32(dtype):
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


def test_a_model_with_its_own_activation_checkpointing_is_rejected():
    model = make("gpt2")
    model.activation_checkpointing_enable()
    with pytest.raises(UserError, match=r"pipeline\.activation_checkpoint_interval"):
        parts_of(model)


def test_modules_are_added_below_existing_ones():
    root, first, second = torch.nn.Module(), torch.nn.Identity(), torch.nn.Identity()
    place(root, "a.b.0", first)
    place(root, "a.b.2", second)
    assert dict(root.named_modules())["a.b.2"] is second
    assert list(root.a.b._modules) == ["0", "2"]
