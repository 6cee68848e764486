import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megalowbit.telemetry.settings import TelemetrySettings, TensorBoardBlock, WandbSettings


def test_defaults_record_everything():
    assert TelemetrySettings().model_dump() == {
        "log_every": 10,
        "tensorboard": True,
        "former_names": True,
        "overflow": True,
        "count_every": 10,
        "layers_every": 100,
        "peak_tflops": None,
        "timers": False,
    }


def test_deepspeeds_blocks_have_deepspeeds_fields_and_defaults():
    from deepspeed.monitor.config import TensorBoardConfig, WandbConfig

    for ours, theirs in ((TensorBoardBlock, TensorBoardConfig), (WandbSettings, WandbConfig)):
        expected = {name: field.default for name, field in theirs.model_fields.items()}
        assert {name: field.default for name, field in ours.model_fields.items()} == expected


def test_tensorboard_events_go_where_deepspeed_puts_them():
    default = Path("runs/x/tensorboard")
    assert TensorBoardBlock().folder(default) == default
    assert TensorBoardBlock(enabled=True).folder(default) == default
    block = TensorBoardBlock(enabled=True, output_path="boards", job_name="night")
    assert block.folder(default) == Path("boards/night")
    assert block.model_copy(update={"enabled": False}).folder(default) == default


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (TelemetrySettings, {"log_evry": 5}),
        (TelemetrySettings, {"log_every": 0}),
        (TelemetrySettings, {"count_every": 0}),
        (TelemetrySettings, {"layers_every": -1}),
        (WandbSettings, {"mode": "offline"}),
        (TensorBoardBlock, {"path": "x"}),
    ],
)
def test_unknown_keys_and_impossible_values_are_refused(model, values):
    with pytest.raises(ValidationError):
        model(**values)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        TelemetrySettings().log_every = 3


def test_importing_the_settings_is_light():
    code = (
        "import sys, megalowbit.telemetry.settings; "
        "sys.exit(str({'torch', 'rich', 'wandb', 'deepspeed'} & set(sys.modules) or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stderr == "\n" or done.returncode == 0, done.stderr
