"""DeepSpeed's configuration: keys, values and defaults that we check, translate or fill in."""

import deepspeed
import pytest
from deepspeed.runtime.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
)

from megalowbit.engine.versions import installed as installed_versions


def test_deepspeed_is_the_pinned_version():
    assert deepspeed.__version__ == installed_versions.DEEPSPEED, (
        "run this folder and mend what fails, then change the pin"
    )


def test_the_size_of_the_job_comes_from_the_mpu_alone(engine):
    class RecordingArguments:
        def __init__(self):
            self.names = []

        def __getattr__(self, name):
            self.names.append(name)
            return lambda: 3

    asked = RecordingArguments()
    settings = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert DeepSpeedConfig(settings, asked).world_size == 3
    assert set(asked.names) == {"get_data_parallel_world_size"}, (
        "check_nested_blocks has no other function: every configuration would be rejected"
    )
    with pytest.raises((AssertionError, DeepSpeedConfigError)):
        DeepSpeedConfig({**settings, "train_batch_size": 4}, asked)
