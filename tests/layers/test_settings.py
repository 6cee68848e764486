import subprocess
import sys

import pytest
from pydantic import ValidationError

from megalowbit.layers.settings import ActivationCheckpointingSettings, RegularizerSettings


def test_the_regularizer_is_off_by_default():
    assert RegularizerSettings().strength == 0


def test_settings_survive_json():
    settings = RegularizerSettings(strength=1e-4, alpha2=0, epsilon=1e-5)
    assert RegularizerSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"strength": -1e-4}, "strength"),
        ({"strength": "1e-4"}, "strength"),
        ({"alpha1": float("nan")}, "alpha1"),
        ({"epsilon": 1e-9}, "epsilon"),
        ({"max_gradient": 0}, "max_gradient"),
        ({"max_gradient": float("inf")}, "max_gradient"),
        ({"lambda": 1}, "lambda"),
        ({"strength": 1, "alpha1": 0, "alpha2": 0}, "alpha1 and alpha2 are both 0"),
    ],
)
def test_an_implausible_value_is_rejected(values, key):
    with pytest.raises(ValidationError, match=key):
        RegularizerSettings.model_validate(values)


def test_importing_the_settings_does_not_import_torch():
    code = "import sys, megalowbit.layers.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, []), ({"every": 1}, range(6)), ({"every": 2}, [0, 2, 4]), ({"every": 2, "first": 3}, [0, 2])],
)
def test_blocks_to_recompute_are_every_nth_of_the_first(values, expected):
    settings = ActivationCheckpointingSettings(**values)
    assert [index for index in range(6) if settings.is_recomputed(index)] == list(expected)


def test_the_first_blocks_alone_choose_nothing():
    with pytest.raises(ValidationError, match="set every to 1"):
        ActivationCheckpointingSettings(first=2)
