"""The engine's keys of the `"megalowbit"` block: defaults, and combinations that are rejected."""

import pytest
from pydantic import ValidationError

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.layers.recipe import recipe


@pytest.mark.parametrize(("precision", "scaler"), [("fp16", "dynamic"), ("bf16", "none"), ("fp32", "none")])
@pytest.mark.parametrize("section", [{}, {"grad_scaler": None}, {"grad_scaler": {}}])
def test_the_precision_decides_the_grad_scaler_unless_a_type_is_given(precision, scaler, section):
    assert EngineSettings(precision=precision, **section).grad_scaler.type == scaler


def test_a_given_type_is_kept():
    settings = EngineSettings(precision="bf16", grad_scaler={"type": "constant", "scale": 64})
    assert settings.grad_scaler.build().scale == 64.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp16", "grad_scaler": {"type": "none"}}, "fp16 expects a grad scaler"),
        ({"precision": "fp32", "grad_scaler": {"type": "constant", "scale": 64}}, "fp32 uses no grad scaler"),
        ({"precision": "fp32", "autocast": True}, "everything is fp32 already"),
        ({"precision": "fp32", "fp32_norms": True}, "everything is fp32 already"),
        ({"recipe": "bf16", "regularizer": {"strength": 1e-6}}, "it acts on low-bit layers"),
    ],
)
def test_settings_that_cannot_be_combined_are_rejected(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineSettings.model_validate(values)


def test_a_schedule_that_is_not_set_is_left_out_of_the_resolved_configuration():
    assert "lr_schedule" not in EngineSettings().model_dump()
    assert EngineSettings(lr_schedule={"type": "constant"}).model_dump()["lr_schedule"]["type"] == "constant"


def test_layers_of_a_recipe_are_recorded_in_an_order_that_comparisons_see():
    layers = {"*.mlp.*": "mxfp8", "*.h.0": {"split_input": None}}
    block = {"base": {"base": "nvfp4", "layers": layers}, "name": "mine"}
    found = EngineSettings(recipe=block).model_dump(mode="json")["recipe"]
    pairs = [["*.mlp.*", "mxfp8"], ["*.h.0", {"split_input": None}]]
    assert found == {"base": {"base": "nvfp4", "layers": pairs}, "name": "mine"}
    assert EngineSettings(recipe=found).recipe == found
    assert recipe(found) == recipe(block)
    for other in ("nvfp4", None, {"base": "nvfp4", "layers": "mxfp8"}):
        assert EngineSettings(recipe=other).recipe == other
