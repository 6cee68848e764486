"""DeepSpeed's configuration: keys, values and defaults that we check, translate or fill in."""

import inspect

import deepspeed
import pytest
import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    DeepSpeedConfig,
    DeepSpeedConfigError,
)
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_SUPPORTED, GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.logging import log_levels

from megalowbit.engine import deepspeed_keys, deepspeed_values, stock_precision
from megalowbit.engine.config import DEFAULT_CLIPPING
from megalowbit.engine.optimizer_settings import SCHEDULERS

# read by deepspeed.initialize or the engine, not by DeepSpeedConfig
READ_ELSEWHERE = {"sequence_parallel_size", "data_parallel_size"}


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
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        for name in ("fp32", "fp16", "bf16", "int8", "fp8"):
            if name in deepspeed_values.CHOICES[key]:
                DeepSpeedConfig({"train_batch_size": 1, key: name})
            else:
                with pytest.raises(ValueError, match="Supported data types"):
                    DeepSpeedConfig({"train_batch_size": 1, key: name})


def test_values_are_checked_of_known_keys_only():
    checked = (
        deepspeed_values.OBJECT_KEYS
        | deepspeed_values.BOOLEAN_KEYS
        | deepspeed_values.COUNT_KEYS
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


def test_the_size_of_the_job_comes_from_the_mpu_alone(engine):
    class Asked:
        def __init__(self):
            self.names = []

        def __getattr__(self, name):
            self.names.append(name)
            return lambda: 3

    asked = Asked()
    settings = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert DeepSpeedConfig(settings, asked).world_size == 3
    assert set(asked.names) == {"get_data_parallel_world_size"}, (
        "check_nested_blocks has no other function: every configuration would be rejected"
    )
    with pytest.raises((AssertionError, DeepSpeedConfigError)):
        DeepSpeedConfig({**settings, "train_batch_size": 4}, asked)


def test_the_keys_of_zero_optimization_are_the_ones_we_know():
    fields = DeepSpeedZeroConfig.model_fields
    known = fields.keys() | {field.alias for field in fields.values() if field.alias}
    assert known == deepspeed_keys.ZERO_KEYS, "zero_values must say what each new key does, or refuse it"
