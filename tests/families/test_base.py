import pytest
import torch
from tiny_models import KINDS, tiny_config, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from megalowbit.errors import UserError
from megalowbit.families.base import FULL, SLIDING
from megalowbit.families.config_checks import check_config
from megalowbit.families.registry import FAMILIES, family


def test_every_family_has_a_tiny_model():
    assert tuple(FAMILIES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_names_every_projection_of_the_real_model_and_nothing_else(kind):
    with torch.device("meta"):
        model = tiny_model(kind, num_layers=3)
    names = family(kind)
    inside = {
        name
        for name, module in model.get_submodule(names.blocks).named_modules(prefix=names.blocks)
        if isinstance(module, nn.Linear | Conv1D)
    }
    found = names.projection_names(model.config)
    assert set(found) == inside
    assert len(found) == 3 * len(names.projections)
    assert names.block_names(model.config) == [
        name for name, module in model.named_modules() if name in {f"{names.blocks}.{n}" for n in range(9)}
    ]
    assert (names.load_model_class(), names.load_config_class()) == (type(model), type(model.config))


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_with_weights_is_in_the_description(kind):
    """What is neither in a block nor in a named part would be in no stage of a pipeline."""
    model, names = tiny_model(kind, num_layers=1), family(kind)
    parts = [names.tokens, names.positions, names.dropout, names.rotary, names.norm, names.head]
    for part in filter(None, parts):
        model.get_submodule(part)
    outside = {
        name.rpartition(".")[0]
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{names.blocks}.")
    }
    assert outside == {names.tokens, names.norm, names.head, *filter(None, [names.positions])}


@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_columns_and_rows_in_pairs(kind):
    """What one multiplies is the output of the other: heads or MLP features, cut on both sides alike."""
    model, names = tiny_model(kind, num_layers=1), family(kind)
    for name in names.projection_names(model.config):
        projection, module = names.projection(name), model.get_submodule(name)
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        residual = inputs if not projection.is_row else outputs
        assert residual == model.config.hidden_size
        assert (inputs if projection.is_row else outputs) % projection.num_parts == 0
    assert names.projection(names.head) is names.projection(names.tokens) is None


@pytest.mark.parametrize("kind", KINDS)
def test_norms_on_heads_are_those_of_the_size_of_a_head(kind):
    model, names = tiny_model(kind, num_layers=1, hidden_size=64), family(kind)
    block = model.get_submodule(names.block_names(model.config)[0])
    small = {
        name
        for name, module in block.named_modules()
        if "Norm" in type(module).__name__ and module.weight.numel() != model.config.hidden_size
    }
    assert small == set(names.head_norms)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_exists_in_the_configuration_and_its_defaults_are_allowed(kind):
    names = family(kind)
    config = names.load_config_class()()
    fields = (names.num_layers, names.hidden_size, names.num_heads, names.position_limit, names.activation)
    for field in (*fields, *names.sizes, *names.optional_sizes, *names.dropouts, *names.divided):
        assert hasattr(config, field)
    check_config(config, "defaults")
    check_config(tiny_config(kind), "tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_has_a_kind_of_attention(kind):
    found = family(kind).attention(tiny_config(kind, num_layers=3))
    assert len(found) == 3
    assert set(found) <= {FULL, SLIDING}


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"unknown model_type 'lama': did you mean 'llama'\? known: gpt2, llama"
    ):
        family("lama")
    with pytest.raises(UserError, match="unknown model_type"):
        family(["gpt2"])


@pytest.mark.parametrize("kind", KINDS)
def test_former_buffers_are_those_that_transformers_ignores(kind):
    """`from_pretrained` loads a folder that holds them in addition, and no other name."""
    names = family(kind)
    model = tiny_model(kind)
    block = f"{names.blocks}.0"
    attention = next(name for name, _ in model.get_submodule(block).named_children() if "attn" in name)
    for ending in ("attn.bias", "rotary_emb.inv_freq", "attn.weird"):
        ending = ending.replace("attn", attention) if ending.startswith("attn") else f"{attention}.{ending}"
        state = {**model.state_dict(), f"{block}.{ending}": torch.zeros(1)}
        _, report = type(model).from_pretrained(
            None, config=model.config, state_dict=state, output_loading_info=True
        )
        assert (not report["unexpected_keys"]) == ending.endswith(tuple(names.former_buffers) or ("-",))
