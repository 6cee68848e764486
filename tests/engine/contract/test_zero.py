"""DeepSpeed's ZeRO optimizers: the methods our two subclasses override, read, and expect to be called."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)

from megalowbit.engine.initialize import initialize
from megalowbit.engine.versions.internals import INTERNALS
from megalowbit.engine.zero.optimizer import ZeroOptimizer, ZeroOptimizerStage3

STAGES = (1, pytest.param(2, marks=pytest.mark.slow), 3)  # stages 1 and 2 use the same class
KINDS = {1: ZeroOptimizer, 2: ZeroOptimizer, 3: ZeroOptimizerStage3}


class One(torch.nn.Module):
    """A model whose weights all have gradient 1."""

    def __init__(self, count=3):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((count,), 0.1))

    def forward(self):
        return self.weight.float().sum()


def start(stage, *, precision="fp16", scaler=None, steps=1, **keys):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": precision, **({"grad_scaler": scaler} if scaler else {})},
        **keys,
    }
    return initialize(model=One(), config=config)[0]


def step(engine):
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine())
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_builds_the_class_that_ours_replaces(stage):
    engine = start(stage)
    assert type(engine.optimizer) is KINDS[stage], "our subclass no longer fits what the engine builds"
    assert engine.zero_optimization_stage() == stage
    assert engine.basic_optimizer.param_groups is engine.optimizer.param_groups, "schedulers write elsewhere"


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_computes_the_norm_once_and_skips_if_it_is_not_finite(stage, monkeypatch):
    engine = start(stage, precision="bf16")
    asked = []
    name = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
    norm = getattr(engine.optimizer, name)
    monkeypatch.setattr(engine.optimizer, name, lambda: asked.append(1) or norm())
    step(engine)
    assert len(asked) == 1, f"the step no longer calls {name}: it clips and skips by a norm of its own"
    assert engine.was_step_applied()
    before = safe_get_full_fp32_param(engine.module.weight).clone()
    hook = engine.module.weight.register_hook(lambda gradient: gradient * float("nan"))
    step(engine)
    hook.remove()
    assert torch.equal(safe_get_full_fp32_param(engine.module.weight), before), "a NaN was applied in bf16"
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_divided_by_the_scale_they_were_multiplied_by(stage):
    engine = start(stage, scaler={"initial_scale": 16.0, "growth_interval": 1})
    for count in range(1, 4):
        step(engine)
        moved = safe_get_full_fp32_param(engine.module.weight) - torch.tensor(0.1)
        assert moved.tolist() == pytest.approx([-float(count)] * 3, abs=1e-6), (
            "unscaled by a scale that had changed already"
        )
    assert engine.optimizer.loss_scale == 128.0


def test_stock_zero_halves_the_update_when_its_scale_grows(monkeypatch):
    """Why we change the scale after the step; if this fails, DeepSpeed has fixed it."""
    # stock fp16 starts only on CPUs with fp16 instructions; this test does not need them
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    start(1)  # creates a process group
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1},
    }
    model = One()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config, dist_init_required=False)
    moves, before = [], safe_get_full_fp32_param(model.weight).clone()
    for _ in range(4):
        step(engine)
        after = safe_get_full_fp32_param(model.weight).clone()
        moves.append((after - before)[0].item())
        before = after
    assert min(moves) == pytest.approx(-1.0, abs=1e-6)
    assert max(moves) == pytest.approx(-0.5, abs=1e-6), (
        "stock DeepSpeed is exact at growth now: say so in docs"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_and_added_up_in_fp32(stage):
    engine = start(stage, steps=2, scaler={"initial_scale": 16.0})
    optimizer = engine.optimizer
    assert engine.communication_data_type == torch.float32, "gradients travel in half precision"
    assert optimizer.gradient_accumulation_dtype == torch.float32, "micro-batches add up in half precision"
    for factor in (1.0, 2.0**-12):  # fp16 has 11 bits: the second would be lost in 1 + 2^-12
        engine.backward(engine() * factor)
        if factor < 1:
            piece = next(optimizer.pieces())
            assert piece.gradient.dtype == torch.float32
            expected = (1 + 2.0**-12) / 2 * optimizer.loss_scale
            assert piece.gradient.flatten()[0].item() == expected, "a micro-batch was lost to rounding"
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_masters_are_written_through_deepspeeds_functions(stage):
    engine = start(stage)
    weight = engine.module.weight
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full((3,), 0.1)), "masters are rounded weights"
    value = torch.tensor([1.0, 2.0, 3.0])
    (safe_set_local_fp32_param if stage == 3 else safe_set_full_fp32_param)(weight, value)
    assert torch.equal(safe_get_full_fp32_param(weight), value), "initial masters cannot be set exactly"
    assert groups._get_broadcast_src_rank() == 0, "masters would come from another rank than weights"


OFFLOADS = (None, {"offload_optimizer": {"device": "cpu"}})


@pytest.mark.parametrize("offload", OFFLOADS, ids=["device", "offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_have_the_internals_that_we_use(stage, offload):
    engine = start(stage, zero_optimization={"stage": stage, **(offload or {})})
    weight, seen = engine.module.weight, set()

    def check_objects(_):
        objects = {"optimizer": engine.optimizer, "parameter": weight}
        if offload is not None:
            objects["offloaded"] = engine.optimizer
        if stage < 3:
            objects["address"] = weight._hp_mapping
            objects["bucket"] = next(iter(engine.optimizer.ipg_buckets.values()))
        for owner, subject in objects.items():
            seen.update((owner, name) for name in INTERNALS[owner] if hasattr(subject, name))

    handle = weight.register_hook(check_objects)
    step(engine)
    handle.remove()
    check_objects(None)
    for owner in ("optimizer", "parameter", "address", "bucket", *(["offloaded"] if offload else [])):
        for name, (stages, breaks) in INTERNALS[owner].items():
            assert stage not in stages or (owner, name) in seen, (
                f"DeepSpeed's {owner} has no {name} at ZeRO stage {stage} now; on it depends: {breaks}"
            )


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_applies_a_gradient_that_was_written(stage):
    engine = start(stage, precision="bf16")
    engine.backward(engine())
    safe_set = safe_set_local_grad if stage == 3 else safe_set_full_grad
    safe_set(engine.module.weight, torch.full((3,), 4.0))
    before = safe_get_full_fp32_param(engine.module.weight).clone()
    engine.step()
    moved = before - safe_get_full_fp32_param(engine.module.weight)
    assert moved.tolist() == pytest.approx([4.0] * 3), "a gradient set by hand would not be applied"


@pytest.mark.parametrize("stage", STAGES)
def test_each_reduction_ends_in_the_epilogue_and_each_step_resets_the_count(stage, monkeypatch):
    engine = start(stage, precision="bf16", steps=2)
    ended, kind = [], type(engine.optimizer)
    original = kind.independent_gradient_partition_epilogue
    monkeypatch.setattr(
        kind, "independent_gradient_partition_epilogue", lambda self: ended.append(1) or original(self)
    )
    first = 0 if stage == 3 else INITIAL_MICRO_STEP_ID
    step(engine)
    assert len(ended) == (1 if stage == 1 else 2), "a step would be refused though a backward came before it"
    assert engine.optimizer.micro_step_id == first, "after zero_grad the next gradients would be added to"
