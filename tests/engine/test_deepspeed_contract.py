"""Each internal interface of DeepSpeed we rely on, in a small test that says what breaks without it.

A new DeepSpeed is tried by installing it and running this file first.
"""

import inspect

import deepspeed
import pytest
import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_SUPPORTED, GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.utils.logging import log_levels

from megalowbit.engine import deepspeed_keys, deepspeed_values, stock_precision
from megalowbit.engine.config import DEFAULT_CLIPPING
from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer
from megalowbit.engine.initialize import initialize
from megalowbit.engine.optimizer_settings import SCHEDULERS
from megalowbit.engine.overflow_retry import COUNTERS
from megalowbit.engine.process_start import SHARED_MEMORY_OP, import_deepspeed

# read by deepspeed.initialize or the engine, not by DeepSpeedConfig
READ_ELSEWHERE = {"sequence_parallel_size", "data_parallel_size"}


@pytest.fixture
def engine():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=torch.nn.Linear(2, 1, bias=False), config=config)[0]


def micro_step(engine, value=1.0):
    engine.backward(engine(torch.full((1, 2), value).bfloat16()).float().sum())
    engine.step()


def test_deepspeed_is_the_pinned_version():
    assert deepspeed.__version__ == "0.19.8", "run this file and mend what fails, then change the pin"


def test_the_table_of_keys_is_what_deepspeed_reads():
    seen = set()

    class Recorder(dict):
        def get(self, key, default=None):
            seen.add(key)
            return dict.get(self, key, default)

        def __contains__(self, key):
            seen.add(key)
            return dict.__contains__(self, key)

        def keys(self):
            return self

    DeepSpeedConfig(Recorder(train_batch_size=1))
    expected = deepspeed_keys.KNOWN_KEYS | deepspeed_keys.REMOVED_KEYS
    assert seen | READ_ELSEWHERE == expected, "users' keys would be refused, or silently ignored"


def test_the_table_of_removed_keys_is_deepspeeds():
    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) == deepspeed_keys.REMOVED_KEYS


def test_the_choices_we_allow_are_deepspeeds():
    assert set(deepspeed_values.LOG_LEVELS) == set(log_levels)
    assert set(deepspeed_values.CHOICES["gradient_allreduce_op"]) == set(GRADIENT_ALLREDUCE_OP_SUPPORTED)


def test_values_are_checked_of_known_keys_only():
    checked = (
        deepspeed_values.OBJECT_KEYS
        | deepspeed_values.BOOLEAN_KEYS
        | deepspeed_values.COUNT_KEYS
        | deepspeed_values.NAME_KEYS
        | deepspeed_values.CHOICES.keys()
    )
    assert checked <= deepspeed_keys.KNOWN_KEYS, "a misspelt name here checks nothing"
    assert set(DeepSpeedMonitorConfig.model_fields) - {"csv_monitor"} == set(
        deepspeed_values.MONITOR_PACKAGES
    ), "a monitor without its package would fail on rank 0 only, after the model is built"


def test_precision_blocks_have_the_keys_and_defaults_we_translate():
    assert set(DeepSpeedFP16Config.model_fields) == set(stock_precision.KEYS["fp16"])
    assert set(DeepSpeedBF16Config.model_fields) == set(stock_precision.KEYS["bf16"])
    defaults = DeepSpeedFP16Config()
    found = {key: getattr(defaults, key) for key in stock_precision.SCALER_KEYS}
    assert found == stock_precision.SCALER_DEFAULTS, (
        "stock configurations would train with another loss scale"
    )


def test_the_default_of_gradient_clipping_is_ours():
    assert GRADIENT_CLIPPING_DEFAULT == DEFAULT_CLIPPING


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_the_parameters_of_our_table(name):
    cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    required, optional = SCHEDULERS[name]
    parameters = inspect.signature(cls).parameters
    assert set(required) | set(optional) <= set(parameters)
    needed = {key for key, p in parameters.items() if p.default is p.empty} - {"optimizer", "self"}
    assert needed == set(required)


def test_the_shared_memory_kernel_stays_off():
    from deepspeed.comm.torch import build_shm_op

    import_deepspeed()
    assert deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] is False
    assert build_shm_op() is None, "every start on a CPU would compile for a minute, or fail without g++"


def test_init_distributed_takes_what_we_pass():
    names = set(inspect.signature(deepspeed.init_distributed).parameters)
    assert {"dist_backend", "timeout", "verbose", "dist_init_required"} <= names


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


def test_gradients_are_reduced_at_the_boundary_only_and_where_they_are(engine, monkeypatch):
    asked = []
    original = engine.optimizer.get_grads_for_reduction
    monkeypatch.setattr(engine.optimizer, "get_grads_for_reduction", lambda: asked.append(1) or original())
    before = engine.optimizer.grad_buffer.flat.data_ptr()
    micro_step(engine)
    assert not asked, "gradients would be reduced at every micro-batch"
    micro_step(engine)
    assert len(asked) == 1, "ranks would train apart: gradients are not reduced"
    assert engine.optimizer.grad_buffer.flat.data_ptr() == before


def test_the_engine_leaves_clipping_to_the_optimizer_and_reports_its_norm(engine):
    start = next(engine.module.parameters()).detach().clone()
    micro_step(engine)
    micro_step(engine)
    moved = (next(engine.module.parameters()) - start).float().norm().item()
    assert moved == pytest.approx(0.5, rel=1e-2), "clipped twice or not at all"
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5, rel=1e-6)
    assert engine.gradient_clipping() == 0.5


def test_an_overflow_counts_as_skipped_and_holds_the_learning_rate(engine):
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
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mp_rank_00_model_states.pt"]
    assert not (tmp_path / "latest").exists(), "`latest` would name a checkpoint that is not complete yet"
    _, state = engine.load_checkpoint(str(tmp_path), tag="t")
    assert state["mine"] == 1


def test_the_monitor_takes_events(engine):
    engine.monitor.write_events([("name", 1.0, engine.global_samples)])


def test_micro_steps_count_micro_batches(engine):
    micro_step(engine)
    assert engine.micro_steps % engine.gradient_accumulation_steps() == 1, (
        "half-accumulated steps would be saved"
    )


def test_a_step_moves_the_counters_that_a_retry_puts_back_and_no_others(engine):
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
