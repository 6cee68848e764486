"""Optimizers that do not fit the model or the loop, as `check_training` finds them."""

from types import SimpleNamespace

import pytest
import torch
from checked_loops import net, refusal
from torch import nn
from transformers.pytorch_utils import Conv1D

import megalowbit as mlb
from megalowbit.layers.conversion.other_loops import check_training


def ours(model, **settings):
    return mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=0.1, **settings))


def test_a_megalowbit_optimizer_that_expects_a_loss_scale_is_rejected():
    model = net().half()
    optimizer = ours(model, fp16=True, initial_loss_scale=1024.0, params_have_main_grad=False)
    line = refusal(model, optimizer=optimizer)
    assert "Float16OptimizerWithFloat16Params divides gradients by a loss scale of 1024" in line


def test_main_grad_is_rejected_where_several_processes_average_gradients(monkeypatch):
    model = net().bfloat16()
    optimizer = ours(model, bf16=True)
    check_training(model, optimizer=optimizer)  # alone, .grad is the sum in main_grad
    monkeypatch.setattr("megalowbit.layers.conversion.loop_optimizer._is_one_of_many", lambda: True)
    assert "takes gradients from main_grad" in refusal(model, optimizer=optimizer)
    chain = SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=[optimizer]))
    assert "takes gradients from main_grad" in refusal(model, optimizer=chain)
    model = net().bfloat16()
    check_training(model, optimizer=ours(model, bf16=True, params_have_main_grad=False))


def conv1d_net():
    return nn.Sequential(Conv1D(16, 16), Conv1D(16, 16))


def test_an_optimizer_over_weights_that_convert_has_replaced_is_rejected():
    model = conv1d_net()
    early, plain = ours(model, params_have_main_grad=False), torch.optim.SGD(model.parameters(), lr=0.1)
    mlb.convert(model, "nvfp4")
    for optimizer in (early, plain):
        line = refusal(model, optimizer=optimizer)
        assert "holds 2 weights that the model no longer has, and not 0.weight: build the optimizer" in line
    check_training(model, optimizer=ours(model, params_have_main_grad=False))
    check_training(model, optimizer=torch.optim.SGD([model[0].weight], lr=0.1))  # a part of the model


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (torch.float32, torch.bfloat16, "weights were cast to bfloat16 after the optimizer was built for"),
        (torch.bfloat16, torch.float32, "weights with fp32 masters were cast to float32"),
    ],
)
def test_a_model_that_was_cast_after_its_optimizer_was_built_is_rejected(before, after, message):
    model = net().to(before)
    optimizer = ours(model, bf16=before == torch.bfloat16, params_have_main_grad=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(after)
    assert message in refusal(model, optimizer=optimizer)


def test_a_model_that_was_moved_after_its_optimizer_was_built_is_rejected():
    model = net().bfloat16()
    optimizer = ours(model, bf16=True)
    masters = optimizer.fp32_from_float16_groups[0]
    masters[0] = masters[0].to("meta")  # there is no second device here to move the model to
    assert "weights are on cpu and their fp32 masters on meta" in refusal(model, optimizer=optimizer)


def test_lightnings_clipping_is_rejected_where_it_would_clip_nothing():
    model = net().bfloat16()
    model.trainer = SimpleNamespace(gradient_clip_val=0.5)
    optimizer = ours(model, bf16=True)
    assert "gradient_clip_val = 0.5 of Lightning would clip nothing" in refusal(model, optimizer=optimizer)
    model.trainer.gradient_clip_val = None
    check_training(model, optimizer=optimizer)
    model = net()
    model.trainer = SimpleNamespace(gradient_clip_val=0.5)
    check_training(model, optimizer=ours(model))  # fp32: the groups hold the weights themselves
