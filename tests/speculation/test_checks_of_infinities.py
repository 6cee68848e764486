"""A check at an operand with an infinity or a NaN changes no bit of the step, whatever it runs at."""

import math

import torch
from controlled_training import Mlp, batch
from quick_cases import every_pair

import megalowbit as mlb

OPERANDS = ("input", "weight", "grad_output")
PRODUCTS = ("output", "grad_input", "grad_weight")


def spoiled_step(precision, operand, value, dtype, *, every):
    """One finite step, which chooses the precision; then a step with `value` in an operand of both layers."""
    model = Mlp()
    mlb.convert(model, "fp8", seed=5)
    model.to(dtype)
    settings = {
        "candidates": [precision, "bf16"],
        "threshold_db": 0,
        "every": every,
        "lookahead": 0,
        "patience": 1,
    }
    controller = mlb.PrecisionController(model, settings)
    x = batch(0).to(dtype).requires_grad_()
    controller.begin_step()
    model(x).square().mean().backward()
    assert controller.end_step() is not None
    model.zero_grad()
    x = batch(1).to(dtype)
    weight = torch.ones(len(x), 1, dtype=dtype)
    if operand == "input":
        x[3, 5] = value
    elif operand == "weight":
        with torch.no_grad():
            model.up.weight[7, 9] = value
    else:
        weight[4] = value
    x.requires_grad_()
    controller.begin_step()
    assert {controller.precision("up", product) for product in PRODUCTS} == {precision}
    output = model(x)
    (output * weight).sum().backward()
    report = controller.end_step()
    found = [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return found, report


@every_pair(
    precision=["nvfp4", "int8", "fp8", "mixed"],
    operand=OPERANDS,
    value=[math.inf, -math.inf, math.nan],
    dtype=[torch.float32, torch.bfloat16],
)
def test_a_check_changes_no_bit_of_a_step_that_is_not_finite(precision, operand, value, dtype):
    with_check, report = spoiled_step(precision, operand, value, dtype, every=1)
    without, nothing = spoiled_step(precision, operand, value, dtype, every=1000)
    assert report is not None
    assert nothing is None
    for one, other in zip(with_check, without, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0))
    assert any(not each.isfinite().all() for each in with_check)
    assert any(each.left_ratio is None or each.right_ratio is None for each in report.rows)


def test_a_tensor_with_two_levels_of_scales_loses_the_spoiled_block_alone():
    """So its maximum must be that of the other blocks, which the estimate does not tell."""
    (output, *_), _ = spoiled_step("nvfp4", "input", math.inf, torch.float32, every=1)
    rows = torch.ones(len(output), dtype=torch.bool)
    rows[3] = False
    assert output[3].isnan().all()
    assert output[rows].isfinite().all()
    assert output[rows].abs().amax() > 0.01
