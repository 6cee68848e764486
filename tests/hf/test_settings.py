import subprocess
import sys

import pytest
from pydantic import ValidationError

from megalowbit.hf.settings import ModelSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs either config .* neither is given"),
        ({"config": "a.json", "checkpoint": "b"}, "needs either config .* both are given, set one to null"),
        ({"config": "a.json", "override": {}}, "override"),
        ({"config": "a.json", "overrides": [1]}, "valid dictionary"),
    ],
)
def test_exactly_one_source_and_known_keys_are_required(values, message):
    with pytest.raises(ValidationError, match=message):
        ModelSettings.model_validate(values)


def test_settings_survive_json():
    settings = ModelSettings(config="a.json", overrides={"n_layer": 2})
    assert ModelSettings.model_validate_json(settings.model_dump_json()) == settings


def test_importing_the_settings_is_light():
    code = (
        "import sys, megalowbit.hf.settings; "
        "heavy = {'torch', 'transformers', 'safetensors'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
