import subprocess
import sys

import pytest
from pydantic import ValidationError

from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings


def test_it_is_off_unless_asked_for_and_frozen():
    settings = LayerScalingSettings()
    assert not settings.enabled
    with pytest.raises(ValidationError):
        settings.enabled = True


def test_modules_come_from_a_json_list():
    assert LayerScalingSettings(modules=["*.attn", "*.mlp"]).modules == ("*.attn", "*.mlp")
    assert LayerScalingSettings().model_dump(mode="json")["modules"] == []


@pytest.mark.parametrize(
    "values",
    [
        {"max_factor": 3.0},
        {"max_factor": 0.5},
        {"max_factor": 2.0**127},
        {"modules": "*.attn"},
        {"modules": ["*.attn", ""]},
        {"modules": [3]},
        {"target": 0.0},
        {"target": 2.0**16},
        {"smoothing": 1.0},
        {"every": 0},
        {"enabled": 1},
        {"unknown": 1},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        LayerScalingSettings(**values)


def test_settings_need_no_torch():
    code = "import sys, megalowbit.optim.statistics.layer_scaling_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
