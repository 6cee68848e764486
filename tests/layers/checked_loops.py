"""Models for `check_training`, and the line with which it rejects one."""

import pytest
from torch import nn

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.other_loops import check_training


def net(recipe="nvfp4", **arguments):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if recipe is not None:
        mlb.convert(model, recipe, **arguments)
    return model


def refusal(model, **arguments):
    with pytest.raises(UserError) as seen:
        check_training(model, **arguments)
    assert "\n" not in str(seen.value)
    return str(seen.value)
