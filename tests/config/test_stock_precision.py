import pytest

from megalowbit.config.stock_precision import SCALER_KEYS, take_stock_precision
from megalowbit.errors import UserError


def test_an_fp16_block_becomes_our_dynamic_scaler_and_is_gone():
    fp16 = {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
        "hysteresis": 3, "consecutive_hysteresis": True, "min_loss_scale": 2,
    }  # fmt: skip
    config = {"fp16": fp16, "bf16": {"enabled": False}, "steps_per_print": 10}
    assert take_stock_precision(config, {}) == {
        "precision": "fp16",
        "grad_scaler": {
            "type": "dynamic", "mode": "deepspeed", "initial_scale": 4096.0, "min_scale": 2.0,
            "growth_interval": 500, "hysteresis": 3, "consecutive_hysteresis": True,
        },
    }  # fmt: skip
    assert config == {"steps_per_print": 10}


@pytest.mark.parametrize(
    "extra", [{}, dict.fromkeys(("loss_scale", "initial_scale_power", "hysteresis"), "auto")]
)
def test_values_left_out_or_auto_are_deepspeeds_defaults(extra):
    scaler = take_stock_precision({"fp16": {"enabled": True, **extra}}, {})["grad_scaler"]
    assert scaler == {
        "type": "dynamic", "mode": "deepspeed", "initial_scale": 65536.0, "min_scale": 1.0,
        "growth_interval": 1000, "hysteresis": 2, "consecutive_hysteresis": False,
    }  # fmt: skip


def test_a_loss_scale_that_is_not_zero_is_constant():
    config = {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}}
    assert take_stock_precision(config, {})["grad_scaler"] == {"type": "constant", "scale": 128.0}


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_a_bf16_block_needs_no_scaler(name):
    config = {name: {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": False}}
    assert take_stock_precision(config, {"precision": "bf16"}) == {"precision": "bf16"}
    assert config == {}


@pytest.mark.parametrize("block", [{}, {"precision": "fp32"}])
def test_disabled_and_auto_blocks_say_nothing(block):
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 8}, "bf16": {}}
    assert take_stock_precision(config, block) == {}
    assert config == {}


@pytest.mark.parametrize(
    ("config", "block", "added"),
    [
        ({"bf16": {"enabled": False}}, {}, {"precision": "fp32"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, {}, {"precision": "fp32"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, {}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False}}, {"precision": "bf16"}, {}),
        ({"bf16": {"enabled": False}}, {"precision": "fp32"}, {}),
        ({}, {}, {}),
    ],
)
def test_a_block_that_is_explicitly_off_means_fp32_where_nothing_else_is_said(config, block, added):
    assert take_stock_precision(config, block) == added


def test_enabled_auto_follows_our_precision():
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 8}, "bf16": {"enabled": "auto"}}
    assert take_stock_precision(config, {"precision": "fp16"})["grad_scaler"]["initial_scale"] == 256


def test_a_scaler_of_ours_is_kept_where_the_stock_block_names_none():
    config = {"fp16": {"enabled": True}}
    assert take_stock_precision(config, {"grad_scaler": {"hysteresis": 5}}) == {"precision": "fp16"}


@pytest.mark.parametrize(
    ("config", "block", "message"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {},
            "fp16.enabled and bf16.enabled are both",
        ),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "fp16.enabled .* megalowbit.precision = 'bf16'"),
        (
            {"fp16": {"enabled": True, "hysteresis": 3}},
            {"grad_scaler": {"hysteresis": 2}},
            "fp16.hysteresis = 3 contradicts megalowbit.grad_scaler",
        ),
        ({"fp16": {"enabeld": True}}, {}, "unknown key 'fp16.enabeld': did you mean 'fp16.enabled'"),
        ({"fp16": True}, {}, "must be an object"),
        ({"fp16": {"enabled": 1}}, {}, "fp16.enabled = 1"),
        (
            {"fp16": {"enabled": True, "auto_cast": True}},
            {},
            "fp16.auto_cast = True cannot be used: .* megalowbit.autocast",
        ),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": 1}}, {}, "consecutive_hysteresis"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {}, "bf16_optimizer_states"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 40}},
            {},
            "initial_scale_power = 40 must be a whole number, 0 … 32",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2.5}},
            {},
            "initial_scale_power = 2.5 must be a whole",
        ),
        *[
            ({"fp16": {"enabled": True, key: 10**400}}, {}, f"fp16.{key} = 1000.* must be a finite number")
            for key in SCALER_KEYS
            if key != "consecutive_hysteresis"
        ],
        ({"bf16": {"enabled": False}}, {"precision": "bf16"}, "^bf16.enabled = false .*precision = 'bf16'"),
        ({"fp16": {"enabled": False}}, {"precision": "fp16"}, "^fp16.enabled = false .*precision = 'fp16'"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, {}, "two names of one block"),
        ({"bf16": {"enabled": True, "check_grad_overflow": "no"}}, {}, "check_grad_overflow = 'no' must be"),
        ({"bf16": {"immediate_grad_update": 1}}, {}, "immediate_grad_update = 1 must be true or false"),
        ({"fp16": {"enabled": True, "auto_cast": 0}}, {}, "fp16.auto_cast = 0 must be true or false"),
        ({"fp16": {"enabled": True, "initial_scale_power": True}}, {}, "initial_scale_power = True"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, {}, "loss_scale_window"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, {}, "min_loss_scale"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, {}, "loss_scale = -1"),
    ],
)
def test_contradictions_and_what_has_no_counterpart_are_refused(config, block, message):
    with pytest.raises(UserError, match=message):
        take_stock_precision(config, block)
