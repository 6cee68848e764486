"""docs/names.md names what there is: every name in its right columns is looked up."""

import importlib
import re
from pathlib import Path

import pytest

import megalowbit as mlb
from megalowbit.quantize.names import quantizer

PAGE = (Path(__file__).parent.parent / "docs" / "names.md").read_text(encoding="utf-8")
ROWS = [row.strip("| ").split(" | ", 1) for row in re.findall(r"^\| .*", PAGE, re.M)]
HERE = " ".join(row[1] for row in ROWS)


def found(path):
    """The object that a dotted name stands for."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{path} does not exist")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:mlb|megalowbit)\.[\w.]+)`", HERE))))
def test_names_exist(name):
    assert found(name.replace("mlb.", "megalowbit.")) is not None
    if name.startswith("mlb."):
        assert name.split(".")[1] in mlb.__all__


def test_tags_are_recorded_and_quantizers_can_be_built():
    tags = set(re.findall(r"`(gradient_overflow/\w+)`", HERE))
    assert len(tags) == 4
    assert tags <= mlb.GradientOverflowTracker().end_step().facts().keys()
    names = set(re.findall(r"`(\w*(?:fp4e2m1|int8e5m2)\w*(?::\w+)?)`", HERE))
    assert len(names) == 3
    assert all(quantizer(name) is not None for name in names)


def test_every_table_has_what_other_code_calls_it():
    """The names that the five documents define or call, which must not be lost from the page."""
    there = " ".join(row[0] for row in ROWS)
    for name in (
        "GradientOverflowTracker", "record_overflow", "get_stats", "Cast2Fp4e2m1Block",
        "svd_quant", "schedule_l1_m1p5_s2",
        "get_megatron_optimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer", "MegatronGradScaler",
        "ConstantGradScaler", "DynamicGradScaler", "get_loss_scale", "reload_model_params", "clip_grad_norm",
        "_unscale_main_grads_and_check_for_nan", "params_have_main_grad", "P_zero",
        "target_max", "threshold_high",
    ):  # fmt: skip
        assert name in there, name
