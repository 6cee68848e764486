import inspect
import math
import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler
from megalowbit.optim.loss_scale.registry import (
    STRATEGIES,
    AnyGradScalerSettings,
    build_grad_scaler,
    default_scaler_type,
)


class Block(BaseModel):
    grad_scaler: AnyGradScalerSettings


def read(settings):
    """Settings of a `"grad_scaler"` block, of a dynamic scaler where it names no type."""
    return Block(grad_scaler={"type": "dynamic", **settings}).grad_scaler


def test_defaults_by_precision():
    assert [default_scaler_type(each) for each in ("fp16", "bf16", "fp32")] == ["dynamic", "none", "none"]
    dynamic = build_grad_scaler(read({}), "fp16")
    assert isinstance(dynamic, DynamicGradScaler)
    assert (dynamic.scale, dynamic.growth_interval, dynamic.hysteresis) == (2.0**32, 1000, 2)
    assert build_grad_scaler(read({"type": "none"}), "bf16") is None
    assert build_grad_scaler(read({"type": "none"}), "fp32") is None


def test_fp16_without_a_scaler_is_refused():
    with pytest.raises(UserError, match=r"fp16 expects a grad scaler\."):
        build_grad_scaler(read({"type": "none"}), "fp16")


def test_fp32_with_a_scaler_is_refused():
    with pytest.raises(UserError, match="fp32 uses no grad scaler"):
        build_grad_scaler(read({}), "fp32")


def test_bf16_takes_a_constant_scaler():
    assert build_grad_scaler(read({"type": "constant", "scale": 8}), "bf16").scale == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "constant"}, 'needs "scale"'),
        ({"type": "constant", "scale": 2, "hysteresis": 2}, "hysteresis belong"),
        ({"type": "dynamic", "scale": 2}, 'belongs to type "constant"'),
        ({"type": "none", "growth_interval": 5}, "growth_interval belong"),
        ({"hystresis": 2}, "Extra inputs"),
        ({"type": "static"}, "type"),
        ({"type": "max_value", "mode": "torch"}, "mode belongs to type \"dynamic\", not 'max_value'"),
        ({"type": "norm_ratio", "target": 3}, 'target belongs to type "max_value" or "max_norm" or'),
        ({"epsilon": 0.1}, "epsilon belongs to type .*, not 'dynamic'"),
        ({"type": "max_value", "scale": 2}, 'use "initial_scale"'),
        ({"mode": "torch", "hysteresis": 3}, "hysteresis belongs to mode .*, not 'torch'"),
        ({"consecutive_hysteresis": True}, 'belongs to mode "deepspeed", not'),
        ({"type": "controller", "clip": 0.2}, "dead_band must be in"),
        ({"type": "max_value", "target": 1e6}, "target must be in"),
        ({"mode": "torch", "max_scale": 1e300}, "it must be a number that fits in float32"),
        ({"type": "constant", "scale": 1e39}, "it must be a number that fits in float32"),
        ({"type": "constant", "scale": 1e-45}, "it must be a number that fits in float32"),
        ({"initial_scale": 1e-46, "min_scale": 1e-47}, "it must be a number that fits in float32"),
        ({"growth_factor": 1 + 1e-9}, "growth_factor must be a number that differs from 1 in float32"),
    ],
)
def test_settings_reject_arguments_that_cannot_be_combined(settings, message):
    with pytest.raises(ValidationError, match=message):
        read(settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"type": "constant", "scale": -1}, "scale"),
        ({"type": "constant", "scale": math.inf}, "scale"),
        ({"initial_scale": 10**400}, "initial_scale"),
        ({"initial_scale": 2.0**33}, "initial_scale"),
        ({"initial_scale": 1, "min_scale": 2}, "initial_scale"),
        ({"max_scale": 8}, "initial_scale"),
        ({"min_scale": True}, "min_scale"),
        ({"max_scale": math.nan}, "max_scale"),
        ({"growth_factor": 1}, "growth_factor"),
        ({"backoff_factor": 1}, "backoff_factor"),
        ({"backoff_factor": 0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": "1000"}, "growth_interval"),
        ({"hysteresis": 2.5}, "hysteresis"),
        ({"mode": "torhc"}, "mode"),
        ({"raise_at_min_scale": 1, "mode": "deepspeed"}, "raise_at_min_scale"),
        ({"type": "max_value", "initial_scale": 2.0**33}, "initial_scale"),
        ({"type": "max_value", "ema_decay": 1}, "ema_decay"),
        ({"type": "controller", "gain": 0.6}, "gain"),
        ({"type": "controller", "dead_band": -1}, "dead_band"),
        ({"type": "norm_ratio", "epsilon": 0}, "epsilon"),
        ({"type": "norm_ratio", "probe_every": True}, "probe_every"),
        ({"type": "norm_ratio", "sample": 1.5}, "sample"),
        ({"type": "norm_ratio", "update_every": 0}, "update_every"),
    ],
)
def test_a_setting_out_of_range_is_an_error_of_its_own_key(settings, key):
    with pytest.raises(ValidationError) as caught:
        read(settings)
    kind = settings.get("type", "dynamic")
    assert [error["loc"] for error in caught.value.errors()] == [("grad_scaler", kind, key)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"type": "none"},
        {"type": "constant", "scale": 2.0},
        {"type": "dynamic", "initial_scale": 4.0, "hysteresis": 3},
        {"mode": "torch", "initial_scale": 4.0},
        {"mode": "deepspeed", "consecutive_hysteresis": True},
        {"mode": "clean_step", "min_scale": 0.5, "max_scale": None},
        {"type": "max_value", "target": 2.0**14, "update_every": 3},
        {"type": "norm_ratio", "epsilon": 0.1},
        {"type": "max_norm", "sample": 0.25},
        {"type": "controller", "dead_band": 0},
    ],
)
def test_written_settings_read_back_as_they_are(settings):
    first = read(settings)
    again = read(first.model_dump(mode="json"))
    assert again.model_dump() == first.model_dump()


def test_settings_load_without_torch():
    code = "import sys, megalowbit.optim.loss_scale.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("settings", "scaler", "attributes"),
    [
        ({"type": "dynamic", "mode": "deepspeed"}, DynamicGradScaler, {"mode": "deepspeed", "hysteresis": 2}),
        ({"type": "dynamic", "mode": "torch"}, DynamicGradScaler, {"min_scale": 2.0**-126}),
        ({"type": "dynamic", "mode": "torch", "min_scale": 0.5}, DynamicGradScaler, {"min_scale": 0.5}),
        ({"type": "max_value", "target": 1024}, MaxValueGradScaler, {"target": 1024, "ema_decay": 0.9}),
        ({"type": "norm_ratio", "sample": 0.5}, NormRatioGradScaler, {"sample": 0.5, "probe_every": 100}),
        ({"type": "max_norm", "epsilon": 0.2}, MaxNormGradScaler, {"epsilon": 0.2, "target": 2.0**15}),
        ({"type": "controller", "update_every": 7}, ControllerGradScaler, {"update_every": 7, "gain": 0.5}),
    ],
)
def test_each_type_gives_its_scaler_with_its_arguments(settings, scaler, attributes, precision):
    built = build_grad_scaler(read(settings), precision)
    assert type(built) is scaler
    assert {name: getattr(built, name) for name in attributes} == attributes


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "none"])
def test_settings_are_the_arguments_of_the_class_with_the_same_defaults(kind):
    expected = {}
    for base in STRATEGIES[kind].SCALER.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        named = [each for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
        expected = {
            each.name: each.default for each in named if each.kind is not each.VAR_POSITIONAL
        } | expected
    fields = STRATEGIES[kind].model_fields
    found = {name: field.default for name, field in fields.items() if name != "type"}
    if kind == "constant":
        assert fields["scale"].is_required()
        found["scale"] = inspect.Parameter.empty
    else:
        expected.pop("scale")  # of the bases, which compute it
    assert found == expected


def test_each_strategy_is_registered_under_its_own_type():
    for kind, strategy in STRATEGIES.items():
        assert strategy.model_fields["type"].default == kind
        assert kind == "none" or strategy.SCALER.__name__ == f"{kind.title().replace('_', '')}GradScaler"


def test_an_initial_scale_left_out_is_compared_with_the_bounds_of_its_type():
    assert read({"type": "max_value", "max_scale": 2.0**20}).initial_scale == 2.0**15
    with pytest.raises(ValidationError, match="the default is 32768"):
        read({"type": "max_value", "max_scale": 8.0})


def test_null_leaves_an_argument_to_its_default_even_that_of_another_type():
    assert read({"growth_interval": None, "target": None}) == read({})
    with pytest.raises(ValidationError, match="Extra inputs"):
        read({"growht_interval": None})
