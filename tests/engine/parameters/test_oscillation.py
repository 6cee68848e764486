"""Weights on prescribed paths: which oscillate, and where their masters are afterwards."""

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from staged_engines import every_stage_and_precision

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.oscillation import OscillationWindow, check_measurable
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.recipe import recipe

# With a 6 in each block its scale is 1, and cells are those of E2M1. Masters of the first elements, by step:
PATHS = torch.tensor(
    [
        [0.70, 0.80, 0.70, 0.80],  # 0.5, 1, 0.5, 1: moves .3, its quantised weight 1.5: reset to 1
        [2.40, 2.60, 2.40, 2.40],  # 2, 3, 2, 2: .4 and 2
        [0.60, 0.65, 0.60, 0.65],  # stays in its cell
        [1.00, 3.00, 1.00, 3.00],  # as far as its quantised weight
        [4.00, 4.00, 4.00, 4.00],  # does not move
    ]
)
RATIOS = [5.0, 5.0, 0.0, 1.0, 0.0]


def make(stage, precision):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    zero = {"stage": int(stage[0]), "stage3_param_persistence_threshold": 0}
    if "offload" in stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        "megalowbit": {"precision": precision, "recipe": {"base": "nvfp4", "q_backward_weight": "fp32"}},
    }
    if precision == "fp16":
        config["megalowbit"]["grad_scaler"] = {"type": "constant", "scale": 64.0}
    return initialize(model=net, config=config)[0]


def weight_at(step):
    """(5, 32): row i has path i in its second element, and a 6 first."""
    weight = torch.zeros(5, 32)
    weight[:, 0] = weight[:, 16] = 6.0
    weight[:, 1] = PATHS[:, step]
    return weight


@every_stage_and_precision
def test_masters_that_oscillate_are_set_to_the_middle_of_their_cell_and_no_others(stage, precision):
    engine = make(stage, precision)
    first, last = (layer.weight for layer in bit_layers(engine.module).values())
    untouched = safe_get_full_fp32_param(last).clone()
    safe_set_full_fp32_param(first, weight_at(0))
    window = OscillationWindow(engine.module)
    for step in (1, 2, 3):
        safe_set_full_fp32_param(first, weight_at(step))
        window.measure()
    measured = window.found(4.0)
    assert torch.equal(safe_get_full_fp32_param(first), weight_at(3))
    found = window.reset(4.0)
    assert found == measured
    expected = weight_at(3)
    expected[0, 1], expected[1, 1] = 1.0, 2.0
    assert torch.equal(safe_get_full_fp32_param(first), expected)
    assert torch.equal(safe_get_full_fp32_param(last), untouched)
    assert found.share == 2 / (5 * 32 + 3 * 5)
    lengths = PATHS.diff(dim=1).abs().sum(1)
    assert found.ratio == pytest.approx(float((lengths * torch.tensor(RATIOS)).sum() / lengths.sum()))
    # the next step updates the masters that were reset
    x = torch.full((1, 32), 0.01, dtype=first.dtype)
    engine.backward(engine(x).float().square().sum())
    engine.step()
    moved = safe_get_full_fp32_param(first) - expected
    assert 0 < moved.abs().max() <= 0.11


def test_layers_that_do_not_quantise_their_weight_are_left_out():
    engine = make("0", "bf16")
    for layer in bit_layers(engine.module).values():
        layer.recipe = "bf16"
    window = OscillationWindow(engine.module)
    window.measure()
    assert window.reset(1.0) == (0.0, 0.0)


def test_layers_that_no_longer_quantise_are_left_as_they_are():
    engine = make("0", "bf16")
    first, last = bit_layers(engine.module).values()
    safe_set_full_fp32_param(first.weight, weight_at(0))
    window = OscillationWindow(engine.module)
    for step in (1, 2, 3):
        safe_set_full_fp32_param(first.weight, weight_at(step))
        window.measure()
    first.recipe = "bf16"
    window.measure()
    assert not window.is_empty()  # the last layer still quantises
    assert window.reset(4.0) == (0.0, 0.0)
    assert torch.equal(safe_get_full_fp32_param(first.weight), weight_at(3))
    last.recipe = "bf16"
    window.measure()
    assert window.is_empty()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("bf16", "does not quantise weights"),
        ("mxfp4-rht", "does not quantise weights"),
        ({"base": "nvfp4", "q_forward_weight": "nvfp4e2m1b"}, r"stochastically \(nvfp4e2m1b\)"),
        ({"base": "nvfp4", "split_weight": {"rank": 2}}, "splits weights"),
        ({"base": "nvfp4", "parameter_split": {"rank": 2}}, "splits weights"),
        ({"base": "nvfp4", "layout": "per_gemm", "hadamard": ["output"]}, "transforms weights"),
    ],
)
def test_recipes_without_fixed_cells_are_rejected(block, message):
    with pytest.raises(UserError, match=message):
        check_measurable(recipe(block))
    check_measurable(recipe("nvidia-nvfp4"))
