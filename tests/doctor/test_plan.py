import json
import re
from dataclasses import fields

import pytest
from tiny_models import KINDS, tiny_config

from launchers import write_config
from megalowbit.doctor.plan import RunPlan, plan_run
from megalowbit.errors import UserError
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import estimate_run
from megalowbit.pretrain.estimate.start_memory import estimate_start


def test_sizes_are_those_of_the_configuration(tiny):
    plan = tiny("megalowbit.run.steps=7")
    assert (plan.micro_batch, plan.sequence_length, plan.accumulation, plan.steps) == (2, 32, 2, 7)
    assert plan.step_tokens == 128
    assert plan.parameters == 320 * 32 + 2 * (12 * 1024 + 13 * 32) + 64
    # a half weight, its fp32 master and two moments
    assert plan.checkpoint_bytes == 14 * plan.parameters


def test_memory_is_the_estimate_of_a_dry_run(tiny, tmp_path):
    plan = tiny("zero_optimization.stage=1", processes=2)
    path = write_config(tmp_path)  # another test may have asked for this plan, in its own folder
    config = load_config(path, ["zero_optimization.stage=1"], world_size=2)
    memory = estimate_run(config, recipe(config.recipe))
    assert plan.memory == memory
    assert plan.start == estimate_start(config, memory)


@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_those_of_every_family(kind, tmp_path):
    path = write_config(tmp_path)
    config = tiny_config(kind, vocab_size=256, positions=64)
    path.with_name("model.json").write_text(json.dumps(config.to_dict()))
    # no export: a Qwen2 model cannot have the tokenizer "byte"
    plan = plan_run(load_config(path, ["megalowbit.checkpoint.export_hf=false"], world_size=1))
    heads = [each for each in plan.projections if each.is_head]
    assert plan.projections[-1:] == tuple(heads)
    weights = sum(each.layers * each.in_features * each.out_features for each in plan.projections)
    assert plan.flops.matrices == 6 * weights
    assert any(each.is_lowbit for each in plan.projections)
    assert not heads[0].is_lowbit


def test_tensor_parallelism_divides_projections_but_not_the_flops(tiny):
    whole = tiny()
    halves = tiny("tensor_parallel.autotp_size=2", processes=2)
    assert halves.flops == whole.flops
    assert halves.rank_parameters < whole.rank_parameters == whole.parameters
    sizes = {(each.name, each.is_lowbit): each.out_features * each.in_features for each in halves.projections}
    for each in whole.projections:
        divisor = 1 if each.is_head else 2
        assert sizes[each.name, each.is_lowbit] * divisor == each.out_features * each.in_features


def test_phases_are_those_of_the_late_switch(tiny):
    first, last = tiny('megalowbit.late_switch={"at": 4}', "megalowbit.run.steps=10").phases
    assert (first.share, last.share) == (0.4, 0.6)
    assert last.recipe.q_forward_input == "fp32"
    assert len(tiny("megalowbit.recipe=bf16", 'megalowbit.late_switch={"at": 4}').phases) == 1


@pytest.mark.parametrize(
    ("override", "share"),
    [
        ("megalowbit.activation_checkpointing.every=1", 1.0),
        ("megalowbit.activation_checkpointing.every=2", 0.5),
        ("megalowbit.run.seed=1", 0.0),
    ],
)
def test_the_recomputed_share_counts_blocks(tiny, override, share):
    assert tiny(override).recomputed_share == share


def test_a_mistake_of_the_recipe_is_a_user_error(tiny):
    with pytest.raises(UserError, match="unknown recipe"):
        tiny("megalowbit.recipe=nvfp5")


def test_a_tokenizer_with_more_tokens_than_the_model_is_a_user_error(tiny):
    with pytest.raises(UserError, match="the tokenizer has 256 tokens, the model's vocab_size is only 128"):
        tiny(model={"vocab_size": 128})


def test_a_tokenizer_that_cannot_be_exported_with_the_model_is_a_user_error(tmp_path):
    path = write_config(tmp_path)
    config = tiny_config("qwen2", vocab_size=256, positions=64)
    path.with_name("model.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UserError, match="tokenizer byte cannot be exported with a qwen2 model"):
        plan_run(load_config(path, [], world_size=1))


def test_the_docstring_of_a_plan_names_its_fields():
    documented = re.findall(r"^ {8}(\w+): ", RunPlan.__doc__.partition("Attributes:")[2], flags=re.MULTILINE)
    assert documented == [each.name for each in fields(RunPlan)]
