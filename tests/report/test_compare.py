"""Gaps: means and standard errors against their definition, what is comparable, and which settings differ."""

from dataclasses import replace

import numpy as np
import pytest
from made_runs import write_run

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.keys import KNOWN_KEYS
from megalowbit.pretrain.config import SETTINGS_MODEL
from megalowbit.records.run import read_runs
from megalowbit.report.compare import (
    BESIDE,
    TEXT,
    cautions,
    differing_settings,
    gap_between,
    is_repeat,
    noise_floor,
    why_not_comparable,
)

STEPS = 400


def runs_with(tmp_path, *each, steps=STEPS):
    """Runs `0`, `1` … with losses and changed settings."""
    folders = []
    for number, (losses, changes) in enumerate(each):
        folders.append(write_run(tmp_path / str(number), len(losses), losses=list(losses), changes=changes))
    return read_runs(folders)


def noise(seed, scale=0.1, steps=STEPS):
    return scale * np.random.default_rng(seed).normal(size=steps)


def test_a_gap_is_the_mean_of_paired_differences_with_its_standard_error(tmp_path):
    batches, own = 3 + noise(0, 1.0), noise(1)
    reference, run = runs_with(tmp_path, (batches, {}), (batches + 0.05 + own, {}))
    gap = gap_between(run, reference)
    assert gap.block == 10
    assert gap.means == pytest.approx((0.05 + own).reshape(40, 10).mean(axis=1))
    assert gap.steps.tolist() == list(range(10, STEPS + 1, 10))
    wider = np.sqrt((1 + gap.correlation) / (1 - gap.correlation))
    expected = wider * own.reshape(40, 10).std(axis=1, ddof=1) / np.sqrt(10)
    assert gap.errors == pytest.approx(expected)
    assert gap.correlation < 0.1
    assert gap.end == pytest.approx((0.05 + own)[-40:].mean())
    assert gap.num_end == 40
    assert gap.percent == pytest.approx(100 * gap.end / batches[-40:].mean())


def test_intervals_cover_a_known_gap_about_as_often_as_they_claim(tmp_path):
    covered, blocks = 0, 0
    for seed in range(6):
        batches = 3 + noise(100 + seed, 1.0)
        reference, run = runs_with(tmp_path / str(seed), (batches, {}), (batches + 0.05 + noise(seed), {}))
        gap = gap_between(run, reference)
        covered += int((np.abs(gap.means - 0.05) <= 2 * gap.errors).sum())
        blocks += len(gap.means)
    assert 0.86 < covered / blocks < 0.99  # 93 % for ten steps a block, whose deviation is itself uncertain


def test_correlated_differences_make_wider_intervals(tmp_path):
    white = noise(3)
    slow = np.empty(STEPS)
    slow[0] = white[0]
    for step in range(1, STEPS):
        slow[step] = 0.8 * slow[step - 1] + white[step]
    batches = 3 + noise(4, 1.0)
    reference, run = runs_with(tmp_path, (batches, {}), (batches + slow, {}))
    gap = gap_between(run, reference)
    assert gap.correlation > 0.4


def test_steps_without_a_finite_loss_are_left_out_and_a_short_run_ends_the_gap(tmp_path):
    losses = list(3 + noise(0))
    other = list(losses[:100])
    other[7] = float("nan")
    reference, run = runs_with(tmp_path, (losses, {}), (other, {"megalowbit.run.steps": 100}))
    gap = gap_between(run, reference)
    assert gap.num_left_out == 1
    assert gap.steps[-1] == 100
    assert gap.end == pytest.approx(0.0, abs=1e-12)
    assert "the gap ends at step 100" in " ".join(cautions(run, reference))


def test_too_few_common_steps_have_no_gap(tmp_path):
    reference, run = runs_with(tmp_path, (3 + noise(0), {}), ([3.0] * 9, {}))
    assert gap_between(run, reference) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"megalowbit.data.corpus": "other"}, "they differ in text"),
        ({"megalowbit.data.tokenizer": "bpe"}, "they differ in tokenizer"),
        ({"megalowbit.data.sequence_length": 64}, "they differ in sequence length"),
        (
            {"megalowbit.data.sources": {"a": {}}, "megalowbit.data.corpus": None},
            "they differ in text and blend",
        ),
        ({"megalowbit.recipe": "bf16"}, None),
        ({"megalowbit.run.seed": 7}, None),
    ],
)
def test_only_losses_of_the_same_predictions_are_subtracted(tmp_path, changes, why):
    reference, run = runs_with(tmp_path, (3 + noise(0), {}), (3 + noise(1), changes))
    found = why_not_comparable(run, reference)
    assert found is None if why is None else why in found


def test_other_numbers_of_tokens_a_step_are_not_comparable(tmp_path):
    first = write_run(tmp_path / "a", 50)
    second = write_run(tmp_path / "b", 50, tokens=1024)
    reference, run = read_runs([first, second])
    assert "a step has 1,024 and 512 tokens" in why_not_comparable(run, reference)


def test_another_order_and_other_rates_are_said(tmp_path):
    reference, run = runs_with(
        tmp_path, (3 + noise(0), {}), (3 + noise(1, steps=300), {"megalowbit.data.seed": 2})
    )
    said = " ".join(cautions(run, reference))
    assert "another order" in said
    assert "learning rates differ" in said


# Settings that may change what a run computes: a run that differs in one of them is no repeat.
COMPUTES = {
    *(f"megalowbit.{name}" for name in EngineSettings.model_fields if name != "watchdog"),
    *(
        f"megalowbit.{name}"
        for name in (
            "model.checkpoint", "model.overrides", "model.pad_vocab_to_multiple_of", "model.outliers",
            "data.max_bad_records", "data.seed", "data.validation", "run.steps", "run.seed",
            "run.deterministic", "run.max_consecutive_skips", "run.overflow_retries", "loss_guard",
            "static_inputs", "late_switch", "speculation", "oscillation_reset",
        )
    ),
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint",
    "communication_data_type", "compile", "data_efficiency", "data_parallel_size", "data_types",
    "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "expert_parallel", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "managed_gradient_accumulation", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "tensor_parallel", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip
MIXED = ("model", "data", "run")  # sections whose keys are classified one by one


def settings_of_a_run():
    """Every top-level key of a configuration, every section of its block, and the keys of some sections."""
    sections = {*SETTINGS_MODEL.model_fields, *EngineSettings.model_fields} - {*MIXED}
    keys = {
        f"{section}.{name}"
        for section in MIXED
        for name in SETTINGS_MODEL.model_fields[section].annotation.model_fields
    }
    return {f"megalowbit.{name}" for name in sections | keys} | KNOWN_KEYS


def test_every_setting_is_known_to_change_what_a_run_computes_or_not():
    text, beside = {f"megalowbit.data.{name}" for name in TEXT}, set(BESIDE[::2])
    assert text | beside | COMPUTES == settings_of_a_run()
    assert len(text) + len(beside) + len(COMPUTES) == len(text | beside | COMPUTES)  # each is in one set


@pytest.mark.parametrize(
    "changes",
    [
        {"megalowbit.trackio": {"enabled": True, "project": "x"}},
        {"megalowbit.samples": {"prompts": ["x"]}},
        {"megalowbit.histograms": {"every": 10}},
        {"megalowbit.data.build_timeout": 60},
        {"megalowbit.telemetry": None, "wandb": {"enabled": True}},
    ],
)
def test_a_repeat_may_differ_in_settings_that_compute_nothing(tmp_path, changes):
    seed = {"megalowbit.run.seed": 7}
    reference, repeat = runs_with(tmp_path, (noise(0), {}), (noise(1), {**seed, **changes}))
    assert is_repeat(repeat, reference)


def test_a_repeat_differs_in_seeds_only_and_gives_the_noise_floor(tmp_path):
    seeds = {"megalowbit.run.seed": 2, "megalowbit.data.seed": 2, "megalowbit.run.name": "again"}
    batches = 3 + noise(0)
    reference, repeat, other, same = runs_with(
        tmp_path,
        (batches, {}),
        (batches + 0.02, seeds),
        (batches, {**seeds, "megalowbit.recipe": "bf16"}),
        (batches, {}),
    )
    assert is_repeat(repeat, reference)
    assert not is_repeat(other, reference)
    assert not is_repeat(same, reference)  # the same seed shows nothing about another
    gap = gap_between(repeat, reference)
    assert noise_floor([gap]) == pytest.approx(0.02)
    assert noise_floor([gap, replace(gap, means=0.1 * np.ones(2))]) == pytest.approx(np.sqrt(0.0052))
    cancelling = replace(gap, means=np.array([9.0, 9.0, 0.3, -0.3]))  # noise of single blocks
    assert noise_floor([cancelling]) == pytest.approx(0)
    assert noise_floor([]) is None


def test_settings_that_differ_are_listed_with_the_value_of_each_run(tmp_path):
    found = differing_settings(
        runs_with(tmp_path, ([3.0] * 9, {}), ([3.0] * 9, {"megalowbit.recipe": "bf16", "new.key": [1]}))
    )
    assert found == [("megalowbit.recipe", ["nvfp4", "bf16"]), ("new.key", [..., [1]])]
