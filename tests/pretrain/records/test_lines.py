import json
import re

import pytest
import torch

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.recipe import recipe
from megalowbit.layers.settings import DEFAULT_RECIPE, ROTARY_RECIPE
from megalowbit.pretrain.checks import recipe_advice
from megalowbit.pretrain.estimate.dry_run import describe
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.records.lines import products_line, startup_lines, zero_rate_warning

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


def test_the_precision_of_products_is_reported_on_one_line():
    line = products_line({"output": {"fp8": 1200, "bf16": 2}, "grad_weight": {"bf16": 3}})
    assert line == "products  output 2 bf16 + 1,200 fp8, grad_weight 3 bf16"


def test_the_startup_lines_name_folder_model_recipe_data_and_batch(build_job):
    job = build_job()
    text = startup_lines(job, ProcessIdentity(), is_resumed=False, changes=["run.steps 5 -> 6"])
    first_words = [line.split()[0] for line in text.splitlines() if line]
    assert first_words == [
        "run", "model", "recipe", "kernels", "data", "batch", "flops", "advice", "schedule", "changed"
    ]  # fmt: skip
    parameters = sum(p.numel() for p in job.engine.module.parameters())
    assert f"{parameters:,} parameters" in text
    assert f"{2 * 2 * 32:,} tokens per step on 1 process" in text
    epochs = float(text.partition(", read ")[2].split()[0])
    steps = job.config.settings.run.steps
    assert epochs == pytest.approx(steps * 4 / job.loader.num_samples, rel=0.01)
    assert "resumed" not in text


def test_a_resumed_run_says_after_which_step(build_job):
    job = build_job()
    job.totals.steps = 17
    text = startup_lines(job, ProcessIdentity(), is_resumed=True, changes=[])
    assert "resumed after step 17" in text
    assert "advice" not in text  # it may be too late


def test_layers_of_another_family_are_named_in_the_line_of_the_recipe(build_job, tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    model = f"megalowbit.model.config={tmp_path / 'llama.json'}"
    for given, expected in (
        (
            DEFAULT_RECIPE,
            "14 layers converted, 1 kept; its special layers are of other families, nvfp4-attention-fp8 is ",
        ),
        ("nvfp4-keep-positions", "14 layers converted, 1 kept\n"),
        (ROTARY_RECIPE, "14 layers converted, 1 kept\n"),
    ):
        job = build_job(model, f"megalowbit.recipe={given}")
        text = startup_lines(job, ProcessIdentity(), is_resumed=False, changes=[])
        assert f"recipe    {given}: {expected}" in text
    assert {layer.recipe.name for name, layer in bit_layers(job.engine.module).items() if "attn" in name} == {
        "fp8"
    }


SWITCH = {"at": 0.7, "scope": "forward"}
PERIOD = {"start": 0.7, "period": 400, "window": 50, "threshold": 8.0}


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ((), {"late_switch": SWITCH}),
        (("recipe=nvfp4-first-block-fp8", "late_switch.at=2"), None),
        (("recipe=nvfp4-first-block-fp8", "late_switch=null"), None),
        (("recipe=nvfp4",), None),
        (("recipe=bf16",), None),
        (("recipe=tetrajet-2",), {"oscillation_reset": PERIOD}),
        (('recipe={"base": "nvfp4-first-block-fp8"}',), {"late_switch": SWITCH}),
        (
            ('recipe={"base": "nvfp4-first-block-fp8", "name": "nvfp4-first-block-fp8", "keep_last": 1}',),
            None,
        ),
    ],
)
def test_what_belongs_to_a_recipe_and_is_off_is_named(resolve, overrides, missing):
    config = resolve(*(f"megalowbit.{each}" for each in overrides))
    advice = recipe_advice(config)
    if missing is None:
        assert advice is None
        assert "meant to be used" not in describe(config)
        return
    assert advice.startswith(f"{recipe(config.recipe).name} is meant to be used with ")
    assert json.loads("{" + advice.partition(" with ")[2].removesuffix(", which is off") + "}") == missing
    assert advice in describe(config).split("== layers")[1].split("== products")[0]
    followed = (f"megalowbit.{key}={json.dumps(value)}" for key, value in missing.items())
    steps = "megalowbit.run.steps=1000"
    assert recipe_advice(resolve(steps, *(f"megalowbit.{each}" for each in overrides), *followed)) is None


@pytest.mark.parametrize(
    ("kind", "params", "steps", "remedy"),
    [
        ("WarmupLR", {}, "steps 1 and 2", "set scheduler.params.warmup_min_lr above 0"),
        (
            "WarmupLR",
            {"warmup_type": "linear"},
            "steps 1 and 2",
            "set scheduler.params.warmup_min_lr above 0",
        ),
        ("WarmupLR", {"warmup_min_lr": 1e-4}, None, None),
        (
            "WarmupDecayLR",
            {"total_num_steps": 9},
            "steps 1 and 2",
            "set scheduler.params.warmup_min_lr above 0",
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9},
            "steps 1 and 2",
            "set scheduler.params.warmup_min_ratio above 0 to lose step 1 only",
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9, "warmup_min_ratio": 0.1},
            "step 1",
            "gives it a learning rate of 0; to avoid that, use WarmupDecayLR with warmup_min_lr above 0",
        ),
    ],
)
def test_first_steps_without_a_learning_rate_are_reported_with_a_remedy(
    build_job, kind, params, steps, remedy
):
    scheduler = {"type": kind, "params": {"warmup_num_steps": 3, **params}}
    job = build_job(f"scheduler={json.dumps(scheduler)}")
    line, text = zero_rate_warning(job), startup_lines(job, ProcessIdentity(), is_resumed=False, changes=[])
    if steps is None:
        assert line is None
        assert "schedule " not in text
    else:
        assert re.match(rf"{steps} ha(s|ve) no effect: {kind} ", line)
        assert line.endswith(remedy)
        assert f"schedule  {line}" in text
    unchanged = []
    for _ in range(3):  # what the steps do, as the line says
        before = [parameter.clone() for parameter in job.engine.module.parameters()]
        train_step(job)
        unchanged.append(all(map(torch.equal, before, job.engine.module.parameters())))
    assert unchanged == [steps is not None, steps == "steps 1 and 2", False]
    assert zero_rate_warning(job) is None


def test_a_run_without_a_schedule_may_have_any_learning_rate(build_job):
    assert zero_rate_warning(build_job("scheduler=null")) is None
