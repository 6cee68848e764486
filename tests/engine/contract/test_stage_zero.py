"""The engine at ZeRO stage 0: when it calls our optimizer, and what the optimizer must do itself."""

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer
from megalowbit.engine.overflow_retry import COUNTERS


def test_the_optimizer_callable_gets_the_moved_model_and_its_result_is_used_unwrapped(engine):
    assert type(engine.optimizer) is DeepSpeedFloat16Optimizer, "DeepSpeed would wrap and step it differently"
    assert engine.basic_optimizer is engine.optimizer
    assert next(engine.module.parameters()).dtype == torch.bfloat16


def test_backward_scales_the_loss_through_the_optimizer(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(engine.optimizer, "scale_if_loss", lambda loss: seen.append(loss.item()) or loss * 8)
    engine.backward(engine(torch.ones(1, 2).bfloat16()).float().sum())
    assert len(seen) == 1, "fp16 gradients would underflow: the loss is not scaled"
    assert next(engine.module.parameters()).main_grad.tolist() == [[4, 4]], "8, over two micro-batches"


def test_gradients_are_reduced_in_place_and_only_at_the_accumulation_boundary(
    engine, monkeypatch, micro_step
):
    asked = []
    original = engine.optimizer.get_grads_for_reduction
    monkeypatch.setattr(engine.optimizer, "get_grads_for_reduction", lambda: asked.append(1) or original())
    before = engine.optimizer.grad_buffer.flat.data_ptr()
    micro_step(engine)
    assert not asked, "gradients would be reduced at every micro-batch"
    micro_step(engine)
    assert len(asked) == 1, "ranks would train apart: gradients are not reduced"
    assert engine.optimizer.grad_buffer.flat.data_ptr() == before


def test_the_engine_leaves_clipping_to_the_optimizer_and_reports_its_norm(engine, micro_step):
    start = next(engine.module.parameters()).detach().clone()
    micro_step(engine)
    micro_step(engine)
    moved = (next(engine.module.parameters()) - start).float().norm().item()
    assert moved == pytest.approx(0.5, rel=1e-2), "clipped twice or not at all"
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5, rel=1e-6)
    assert engine.gradient_clipping() == 0.5


def test_an_overflow_counts_as_skipped_and_holds_the_learning_rate(engine, micro_step):
    for value in (1.0, float("nan")):
        micro_step(engine, value)
    assert (engine.skipped_steps, engine.get_lr(), engine.global_steps) == (1, [1.0], 1)
    assert not engine.was_step_applied()
    assert engine.get_global_grad_norm() is None
    micro_step(engine)
    micro_step(engine)
    assert (engine.skipped_steps, engine.get_lr()) == (1, [0.5])


def test_checkpoints_go_through_the_checkpoint_engine(engine, tmp_path, monkeypatch):
    calls = []
    for name in ("makedirs", "save", "commit"):
        original = getattr(engine.checkpoint_engine, name)

        def record(*args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(engine.checkpoint_engine, name, record)
    engine.save_checkpoint(str(tmp_path), tag="t", client_state={"mine": 1}, save_latest=False)
    assert calls == ["makedirs", "makedirs", "save", "commit"], "writes would not be atomic"
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "manifest.json", "mp_rank_00_model_states.pt"
    ]  # fmt: skip
    assert not (tmp_path / "latest").exists(), "`latest` would name a checkpoint that is not complete yet"
    _, state = engine.load_checkpoint(str(tmp_path), tag="t")
    assert state["mine"] == 1


def test_the_monitor_accepts_events(engine):
    engine.monitor.write_events([("name", 1.0, engine.global_samples)])


def test_micro_steps_count_micro_batches(engine, micro_step):
    micro_step(engine)
    assert engine.micro_steps % engine.gradient_accumulation_steps() == 1, (
        "half-accumulated steps would be saved"
    )


def test_a_step_changes_only_the_counters_that_a_retry_restores(engine, micro_step):
    def numbers():
        return {
            name: value
            for name, value in vars(engine).items()
            if isinstance(value, int) and not isinstance(value, bool)
        }

    before = numbers()
    for value in (1.0, float("nan")):
        micro_step(engine, value)
    moved = {name for name, value in numbers().items() if value != before.get(name)}
    assert moved == set(COUNTERS), "a step that was retried would be counted twice"


def test_the_engine_lets_our_optimizer_scale_the_loss(engine):
    assert isinstance(engine.optimizer, ZeROOptimizer), (
        "fp16 gradients would underflow: the loss is not scaled"
    )


def test_functions_for_full_values_call_the_methods_that_we_add_to_parameters(monkeypatch):
    parameter, asked = torch.nn.Parameter(torch.ones(1)), []
    parameter._hp_mapping = None
    for name in ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad"):
        monkeypatch.setattr(parameter, name, lambda *a, name=name: asked.append((name, *a)), raising=False)
    safe_get_full_fp32_param(parameter)
    safe_set_full_fp32_param(parameter, 1)
    safe_get_full_optimizer_state(parameter, "key")
    safe_set_full_optimizer_state(parameter, 2, "key")
    safe_get_full_grad(parameter)
    safe_set_full_grad(parameter, 3)
    assert asked == [
        ("get_full_hp_param",),
        ("set_full_hp_param", 1),
        ("get_full_hp_param", "key"),
        ("set_full_hp_param", 2, "key"),
        ("get_full_hp_grad",),
        ("set_full_hp_grad", 3),
    ], "masters, moments and gradients of stage 0 would be None"
