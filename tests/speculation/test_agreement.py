"""What cannot be speculated is refused before anything has changed; by all ranks, see distributed/."""

import pytest
from controlled_training import PLAIN, Mlp, converted
from torch import nn

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.speculation.agreement import agreed
from megalowbit.speculation.settings import SpeculationSettings


def test_settings_come_back_validated_with_the_layers_in_order():
    settings, exchange = agreed(converted(), PLAIN, None)
    assert settings == SpeculationSettings(**PLAIN)
    assert agreed(converted(), settings, None)[0] is settings
    assert exchange.layers == ("up", "down", "branch")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidats": ["bf16"]}, r"speculation\.candidats.*did you mean 'speculation\.candidates'"),
        ({"every": 0}, r"speculation\.every = 0"),
        ({"candidates": ["int7", "bf16"]}, "int7"),
        ({"estimator": {"type": "median"}}, r"speculation\.estimator = .* type 'median' was removed"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        mlb.PrecisionController(converted(), settings)
    assert "\n" not in str(caught.value)


def test_models_it_cannot_choose_for_are_refused_and_left_alone():
    unnamed = nn.Sequential(mlb.BitLinear(8, 8), mlb.BitLinear(8, 8))
    split = Mlp()
    mlb.convert(split, "metis-nvfp4")
    for model, message in (
        (Mlp(), "no BitLinear layer"),
        (unnamed, "2 BitLinear layers have the name ''"),
        (split, "split_input"),
    ):
        with pytest.raises(UserError, match=message):
            mlb.PrecisionController(model, PLAIN)
        assert all(layer.chooser is None for layer in bit_layers(model).values())
