"""Runs whose loss is computed in chunks and whose blocks are recomputed."""

import json

import pytest
from quick_cases import slow_except

from megalowbit.errors import UserError
from megalowbit.hf.losses import chunked_cross_entropy
from megalowbit.hf.losses.chunked_cross_entropy import is_chunked
from megalowbit.pretrain import config as config_module
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.resume import changed_settings

RECOMPUTED = 'megalowbit.activation_checkpointing={"every": 2}'
CHUNKED = "megalowbit.chunked_cross_entropy=true"


def facts(build_job, *overrides, steps=2):
    """Facts of some steps, without times, and the model."""
    job = build_job(*overrides)
    taken = [train_step(job).facts for _ in range(steps)]
    timed = (
        "second",
        "tflops",
        "mfu",
        "memory_gib",
        "step_ms",
    )  # parts of the names of columns that depend on the clock
    numbers = [{key: each[key] for key in each if not any(part in key for part in timed)} for each in taken]
    return numbers, job.engine.module


def zero(stage):
    return f"zero_optimization={json.dumps({'stage': stage})}"


@pytest.mark.parametrize("stage", slow_except([0, 3], range(4)))
def test_recomputed_blocks_change_no_recorded_number(build_job, stage):
    expected, _ = facts(build_job, zero(stage))
    found, model = facts(build_job, zero(stage), RECOMPUTED)
    assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]
    assert found == expected
    assert any("saturat" in key or "underflow" in key or "clip" in key for key in found[0]), found[0].keys()


@pytest.mark.parametrize("stage", slow_except([0, 3], range(4)))
def test_a_loss_in_chunks_trains_like_a_whole_one(build_job, stage, monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", 0)
    expected, _ = facts(build_job, zero(stage))
    found, model = facts(build_job, zero(stage), CHUNKED, RECOMPUTED)
    assert is_chunked(model)
    for step, other in zip(found, expected, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)


def test_large_vocabularies_are_chunked_by_default(resolve, build_job, monkeypatch):
    config = resolve()
    assert config.parts.settings.chunked_cross_entropy is None
    assert not config.chunks_loss(2**16 - 1)
    assert config.chunks_loss(2**16)
    assert not resolve("megalowbit.chunked_cross_entropy=false").chunks_loss(2**16)
    assert resolve(CHUNKED).chunks_loss(256)
    assert not is_chunked(build_job().engine.module)
    monkeypatch.setattr(config_module, "LARGE_VOCABULARY", 256)
    assert is_chunked(build_job().engine.module)


def test_a_run_may_be_resumed_with_other_memory_settings(resolve):
    before, now = resolve().to_dict(), resolve(RECOMPUTED, CHUNKED).to_dict()
    assert changed_settings(before, now) == [
        "megalowbit.activation_checkpointing.every: 0 → 2",
        "megalowbit.chunked_cross_entropy: None → True",
    ]
    for key in ("activation_checkpointing", "chunked_cross_entropy"):  # a run of an earlier version
        del before["megalowbit"][key]
    assert changed_settings(before, resolve().to_dict()) == []


def test_deepspeeds_own_section_names_ours(resolve):
    with pytest.raises(UserError, match=r"set megalowbit\.activation_checkpointing\.every"):
        resolve('activation_checkpointing={"cpu_checkpointing": true}')
