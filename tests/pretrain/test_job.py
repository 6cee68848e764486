from dataclasses import replace

import numpy as np
import pytest
import torch

from megalowbit.checkpoints.shards import ORIGIN_KEY
from megalowbit.data.token_files.megatron import MegatronWriter
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import read_checkpoint
from megalowbit.layers.conversion.carried_state import split_counts
from megalowbit.layers.conversion.convert import bit_layers, random_stream
from megalowbit.layers.conversion.report import ConversionReport, MissedWeight
from megalowbit.pretrain.job import check_all_projections_seen
from megalowbit.pretrain.loop import train_step


def test_a_job_is_quantised_observed_and_ready(build_job):
    job = build_job()
    layers = bit_layers(job.engine.module)
    assert len(layers) == len(job.report.swapped) == 7
    assert all(layer.observer is job.tracker for layer in layers.values())
    assert {parameter.dtype for parameter in job.engine.module.parameters()} == {torch.bfloat16}
    assert job.step == 0
    # micro-batches of 2 sequences of 32 tokens, two of them accumulated
    assert job.tokens_per_step == 2 * 32 * 2


def test_telemetry_off_leaves_layers_unobserved(build_job):
    job = build_job("megalowbit.telemetry.overflow=false")
    assert job.tracker is None
    assert all(layer.observer is None for layer in bit_layers(job.engine.module).values())


def test_a_checkpoint_restores_position_random_stream_totals_and_counts(build_job):
    job = build_job()
    for _ in range(3):
        train_step(job)
    job.save()
    expected = [train_step(job)[0]["loss"] for _ in range(2)]
    again = build_job()
    assert again.resume()
    assert again.step == 3
    assert again.loader.position == 3 * 4
    assert random_stream(again.engine.module).step == 3 * 2
    assert again.totals.tokens == 3 * again.tokens_per_step
    assert again.tracker.run.elements > 0
    assert [train_step(again)[0]["loss"] for _ in range(2)] == expected


def test_directions_of_weights_are_saved_once_and_of_other_operands_for_each_rank(
    build_job, tmp_path, caplog
):
    recipe = '{"base": "nvfp4", "split_weight": {"rank": 2, "refresh_every": 2}, "split_input": {"rank": 3}}'
    job = build_job(f"megalowbit.recipe={recipe}")
    for _ in range(3):
        train_step(job)
    job.save()
    expected = [train_step(job)[0]["loss"] for _ in range(2)]
    again = build_job(f"megalowbit.recipe={recipe}")
    assert again.resume()
    assert [train_step(again)[0]["loss"] for _ in range(2)] == expected
    assert split_counts(again.engine.module) == split_counts(job.engine.module)

    (own,) = (tmp_path / "run" / "checkpoints").rglob("rank_00000.pt")
    saved = torch.load(own, weights_only=True)
    del saved[ORIGIN_KEY]
    assert {role for states in saved.values() for role in states} == {"input"}
    store = again.store
    store.rank_state = lambda engine, path: None  # as on a rank that was not there
    caplog.clear()
    assert again.resume()
    assert "no split directions for this rank" in caplog.text
    for layer in bit_layers(again.engine.module).values():
        assert layer.split_states.keys() == {"weight"}


def test_there_is_nothing_to_resume_in_an_empty_folder(build_job):
    assert build_job().resume() is False


def test_the_checkpoint_has_everything_an_exporter_reads(build_job, tmp_path):
    job = build_job("megalowbit.recipe.base=nvfp4", 'megalowbit.recipe.keep=["transformer.h.0"]')
    train_step(job)
    job.save()
    stored = read_checkpoint(tmp_path / "run")
    assert stored.hf_config["n_embd"] == 32
    assert stored.recipe.keep == ("transformer.h.0",)
    weight = job.engine.module.transformer.h[1].mlp.c_fc.weight
    name, master = "transformer.h.1.mlp.c_fc.weight", job.engine.optimizer.master_of(weight)
    assert torch.equal(stored.half_state_dict[name], weight)  # what an export is made of by default
    assert stored.state_dict[name].dtype == torch.float32
    assert torch.equal(stored.state_dict[name], master)
    assert not torch.equal(master, weight.float())  # bf16 has rounded it


def test_dropout_and_rounding_depend_on_the_seed_of_the_run(build_job):
    same = [train_step(build_job("megalowbit.run.seed=5"))[0]["grad_norm"] for _ in range(2)]
    other = train_step(build_job("megalowbit.run.seed=6"))[0]["grad_norm"]
    assert same[0] == same[1] != other


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["megalowbit.data.sequence_length=65"], "n_positions 64"),
        (["megalowbit.model.overrides.vocab_size=100"], "vocab_size is only 100"),
        (['megalowbit.recipe={"base": "nvfp4", "keep": ["no.such.layer"]}'], "no.such.layer"),
        (['megalowbit.recipe={"base": "nvfp4", "keep": ["*"]}'], "converts no layer"),
    ],
)
def test_parts_that_do_not_fit_are_refused(build_job, overrides, message):
    with pytest.raises(UserError, match=message):
        build_job(*overrides)


def test_token_ids_of_megatrons_files_are_trained_on_without_their_tokenizer(build_job, tmp_path):
    ids = np.random.default_rng(0).integers(0, 250, 4000)
    with MegatronWriter(tmp_path / "ids", 250) as writer:
        writer.add_document(ids)
    overrides = [f"megalowbit.data.{each}" for each in (f"corpus={tmp_path / 'ids'}", "tokenizer=none")]
    job = build_job(*overrides, "megalowbit.data.vocab_size=250")
    samples = set(map(tuple, ids.reshape(-1, 32).tolist()))
    assert set(map(tuple, next(job.loader)["input_ids"].tolist())) < samples
    assert train_step(job)[0]["loss"] == pytest.approx(np.log(256), rel=0.1)
    with pytest.raises(
        UserError, match=r"token id \d+ at position \d+ of document 0 is outside .* 200 tokens"
    ):
        build_job(*overrides, "megalowbit.data.vocab_size=200")


def test_a_projection_that_is_neither_swapped_nor_kept_is_an_error(build_job):
    job = build_job()
    report = ConversionReport(recipe=job.recipe, swapped=job.report.swapped[1:], kept=job.report.kept)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.c_proj"):
        check_all_projections_seen(job.engine.module.config, report)
    missed = (MissedWeight("transformer.h.0.experts", (2, 4, 4), "a parameter of Experts"),)
    with pytest.raises(UserError, match=r"does not reach weight transformer\.h\.0\.experts \(2, 4, 4\)"):
        check_all_projections_seen(job.engine.module.config, replace(job.report, missed=missed))


def test_quantised_weights_are_cached_only_if_a_step_reuses_them(build_job):
    job = build_job()  # two micro-batches a step
    assert all(layer.weight_slot is not None for layer in bit_layers(job.engine.module).values())
    train_step(job)
    assert len(job.weight_cache) == 0  # the step has changed the weights
    single = build_job(
        "train_batch_size=2", "train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=1"
    )
    assert single.weight_cache is None
    assert build_job("zero_optimization.stage=3").weight_cache is None  # on every rank they would be whole


def test_the_weight_cache_does_not_change_the_losses(build_job):
    kept = build_job()
    expected = [train_step(kept)[0]["loss"] for _ in range(3)]
    plain = build_job()
    for layer in bit_layers(plain.engine.module).values():
        layer.weight_slot = None
    assert [train_step(plain)[0]["loss"] for _ in range(3)] == expected
