"""A run that recomputes blocks equals one that keeps everything, to the last bit."""

from dataclasses import asdict

import pytest
import torch
from quick_cases import slow_except
from tiny_models import KINDS, tiny_model

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.hf.activation_checkpointing import recompute_blocks
from megalowbit.layers.settings import ActivationCheckpointingSettings

STOCHASTIC = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_backward_outputgrad": "nvfp4e2m1b"}
SPLIT = {"base": "nvfp4", "split_input": {"rank": 4, "gains": "ysche"}, "split_weight": {"rank": 2}}
RECIPES = {"bf16": "bf16", "stochastic": STOCHASTIC, "split": SPLIT}
DROPOUT = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


def recomputed(model):
    blocks = model.get_submodule(family(model.config.model_type).blocks)
    return [index for index, block in enumerate(blocks.children()) if block.gradient_checkpointing]


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_blocks_are_recomputed(kind):
    model = tiny_model(kind, num_layers=4)
    recompute_blocks(model, ActivationCheckpointingSettings())
    assert recomputed(model) == []
    recompute_blocks(model, ActivationCheckpointingSettings(every=2, first=3))
    assert recomputed(model) == [0, 2]
    recompute_blocks(model, ActivationCheckpointingSettings(every=3))
    assert recomputed(model) == [0, 3]
    recompute_blocks(model, ActivationCheckpointingSettings())  # what the user has set is kept
    assert recomputed(model) == [0, 3]


def trained(kind, recipe, **settings):
    """Losses, gradients, counts of overflows and products, and forwards of the first projection."""
    more = DROPOUT if kind == "gpt2" else {}
    model = tiny_model(kind, num_layers=4, **more).bfloat16().train()
    model.set_attn_implementation("eager")  # torch's fused backward on a CPU may round by memory addresses
    mlb.convert(model, recipe, seed=3)
    recompute_blocks(model, ActivationCheckpointingSettings(**settings))
    tracker = mlb.GradientOverflowTracker()
    mlb.set_observer(model, tracker)
    forwards = [0]
    name = next(iter(family(kind).projections))
    block = model.get_submodule(family(kind).block_names(model.config)[0])
    block.get_submodule(name).register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    torch.manual_seed(5)
    losses = []
    for micro_batch in range(2):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(micro_batch))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    roles = {role: asdict(counts) for role, counts in tracker.end_step().roles.items()}
    gradients = {key: each.grad for key, each in model.named_parameters()}
    return losses, gradients, roles, forwards[0]


QUICK = [("gpt2", "stochastic"), ("llama", "split")]


@pytest.mark.parametrize(
    ("kind", "recipe"), slow_except(QUICK, [(kind, recipe) for kind in KINDS for recipe in RECIPES])
)
def test_losses_gradients_and_counts_are_bitwise_those_without_recomputation(kind, recipe):
    losses, gradients, roles, forwards = trained(kind, RECIPES[recipe])
    assert forwards == 2
    for settings in ({"every": 1}, {"every": 2, "first": 3}):
        found = trained(kind, RECIPES[recipe], **settings)
        assert found[0] == losses
        for name, gradient in gradients.items():
            assert torch.equal(found[1][name], gradient), name
        assert found[2].keys() == roles.keys()
        for role, counts in roles.items():  # integers exactly; sums of squares up to the order of their terms
            assert found[2][role] == {
                key: value if isinstance(value, int) else pytest.approx(value, rel=1e-11)
                for key, value in counts.items()
            }
        assert found[3] == 2 * forwards  # the first block has been recomputed


def test_a_model_of_no_family_is_rejected():
    settings = ActivationCheckpointingSettings(every=1)
    with pytest.raises(UserError, match="needs a model of transformers, not Linear"):
        recompute_blocks(torch.nn.Linear(2, 2), settings)
