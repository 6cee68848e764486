import copy

import pytest
import torch
from torch import nn

from megalowbit.engine.parameters.split import split_weights
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

IN, HIDDEN, RECIPE = 16, 32, {"base": "nvfp4", "parameter_split": {"rank": 4}}


def build(dtype):
    """A converted model and its optimizer with masters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)).to(dtype)
    convert(model, RECIPE)
    inner = torch.optim.AdamW(model.parameters())
    if dtype == torch.float32:
        return model, FP32Optimizer(inner, clip_grad=0.0)
    return model, Float16OptimizerWithFloat16Params(inner, clip_grad=0.0, grad_scaler=None, bf16=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_split", [False, True])
def test_pending_gradients_are_rejected_and_nothing_changes(dtype, is_split):
    model, optimizer = build(dtype)
    if is_split:
        split_weights(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, IN, dtype=dtype)).float().square().sum().backward()
    with pytest.raises(UserError, match=r"layer 0 has gradients .* applied: call step or zero_grad first"):
        split_weights(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    split_weights(model, optimizer)


@pytest.mark.parametrize("with_main_grad", [False, True])
def test_pending_gradients_of_other_optimizers_are_rejected_too(with_main_grad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN))
    convert(model, RECIPE)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = FP32Optimizer(inner, clip_grad=0.0, params_have_main_grad=True) if with_main_grad else inner
    model(torch.ones(4, IN)).sum().backward()
    with pytest.raises(UserError, match="split weights between optimizer steps: layer 0 has gradients"):
        split_weights(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    split_weights(model, optimizer)
    assert model[0].is_split


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize(("largest", "is_refused"), [(65519.0, False), (65521.0, True), (9e4, True)])
def test_singular_values_beyond_fp16_are_rejected(has_masters, largest, is_refused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)).half()
    left, right = torch.full((IN,), IN**-0.5), torch.full((HIDDEN,), HIDDEN**-0.5)
    convert(model, RECIPE)
    optimizer = inner = torch.optim.SGD(model.parameters(), lr=0.01)
    if has_masters:
        optimizer = Float16OptimizerWithFloat16Params(inner, clip_grad=0.0, grad_scaler=None, bf16=True)
        weight = optimizer.master_of(model[1].weight).detach()
    else:
        weight = model[1].weight.detach()
        largest = 65500.0 if not is_refused else 1.1 * largest  # fp16 rounds the weight too
    weight.copy_(largest * torch.outer(left, right))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if is_refused:
        with pytest.raises(UserError, match=r"layer 1 has the singular value .*: train in bfloat16"):
            split_weights(model, optimizer)
        assert not any(layer.is_split for layer in bit_layers(model).values())
        assert all(map(torch.equal, before, model.parameters()))
    else:
        split_weights(model, optimizer)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
