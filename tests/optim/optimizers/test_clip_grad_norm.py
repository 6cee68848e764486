"""`clip_grad_norm` between backward and step, against float64 and a step that clips by itself."""

import math

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

SCALE = 64.0


def trained(dtype=torch.bfloat16, **options):
    """A model after a backward with a scaled loss, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)).to(dtype)
    inner, options = torch.optim.AdamW(model.parameters(), lr=0.1), {"clip_grad": 0.0, **options}
    if dtype == torch.float32:
        optimizer = FP32Optimizer(inner, **options)
    else:
        optimizer = Float16OptimizerWithFloat16Params(
            inner, grad_scaler=ConstantGradScaler(SCALE), bf16=dtype == torch.bfloat16, **options
        )
    optimizer.scale_loss(model(torch.randn(4, 16, dtype=dtype)).square().sum()).backward()
    return model, optimizer


def gradients(optimizer):
    """All unscaled gradients, as one float64 vector."""
    found = [optimizer.gradients.of(parameter) for _, parameter in optimizer.gradients.named()]
    return torch.cat([each.flatten().double() for each in found]) / optimizer.loss_scale


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"params_have_main_grad": True}),
        (torch.bfloat16, {"params_have_main_grad": False}),
        (torch.float16, {"params_have_main_grad": True}),
        (torch.float32, {}),
    ],
)
def test_gradients_have_the_norm_asked_for(dtype, options):
    _, optimizer = trained(dtype, **options)
    before = gradients(optimizer)
    assert optimizer.clip_grad_norm(0.5) == pytest.approx(before.norm().item(), rel=1e-5)
    accuracy = 1e-2 if options.get("params_have_main_grad") is False else 1e-5  # products in bf16
    torch.testing.assert_close(gradients(optimizer), before * (0.5 / before.norm()), rtol=accuracy, atol=1e-8)
    clipped = gradients(optimizer)
    assert optimizer.clip_grad_norm(1.0) == pytest.approx(0.5, rel=accuracy)
    assert torch.equal(gradients(optimizer), clipped)  # below the norm: nothing changes


def test_the_step_is_that_of_an_optimizer_that_clips_by_itself():
    (model, optimizer), (other, clipping) = trained(), trained(clip_grad=0.5)
    norm = optimizer.clip_grad_norm(0.5)
    assert optimizer.step().grad_norm == pytest.approx(0.5, rel=1e-5)
    assert clipping.step().grad_norm == pytest.approx(norm, rel=1e-6)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.master_of(ours), clipping.master_of(theirs), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_stay_and_skip_the_step(bad):
    model, optimizer = trained(params_have_main_grad=True)
    model[0].weight.main_grad[0, 0] = bad
    before = gradients(optimizer)
    assert optimizer.clip_grad_norm(0.5) == math.inf
    assert torch.equal(gradients(optimizer).nan_to_num(), before.nan_to_num())
    assert not optimizer.step().is_applied


def test_squares_beyond_fp32_are_clipped():
    model, optimizer = trained(params_have_main_grad=True)
    model[0].weight.main_grad.fill_(1e25)
    norm = 1e25 * math.sqrt(model[0].weight.numel()) / SCALE
    assert optimizer.clip_grad_norm(0.5) == pytest.approx(norm, rel=1e-5)
    assert gradients(optimizer).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_chain_is_clipped_by_one_norm():
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))]
    each = [FP32Optimizer(torch.optim.SGD([p], lr=0.1), clip_grad=0.0) for p in parameters]
    chain = ChainedOptimizer(each)
    for parameter, value in zip(parameters, (3.0, -4.0), strict=True):
        (value * parameter).sum().backward()
    norm = math.sqrt(3 * 3.0**2 + 4 * 4.0**2)
    assert chain.clip_grad_norm(1.0) == pytest.approx(norm)
    for optimizer, value in zip(each, (3.0, -4.0), strict=True):
        expected = torch.full_like(gradients(optimizer), value / norm)
        torch.testing.assert_close(gradients(optimizer), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_no_positive_number_is_refused(limit):
    with pytest.raises(UserError, match="the largest norm must be positive and finite"):
        trained()[1].clip_grad_norm(limit)
