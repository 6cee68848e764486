"""A converted model in an engine that `deepspeed.initialize` made: it says no, or one warning."""

import copy
import logging

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

import megalowbit as mlb
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.layers.other_loops import check_training, find_engine

TOLD = "low-bit layers train in an engine of stock DeepSpeed"


def net(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if recipe is not None:
        mlb.convert(model, recipe)
    return model


def make(model, *, stage=0, optimizer=None, **keys):
    start_process_group()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 16, dtype=dtype)).float().sum())
    engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_around_a_model_is_found(stage):
    model = net()
    engine = make(model, stage=stage, bf16={"enabled": True})
    assert find_engine(model) is engine, "the hook of DeepSpeed's engine no longer leads to it"
    check_training(engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_half_precision_is_told_once(stage, caplog):
    engine = make(net(), stage=stage, bf16={"enabled": True})
    with caplog.at_level(logging.WARNING):
        step(engine)
        step(engine)
    assert sum(TOLD in record.message for record in caplog.records) == 1
    assert mlb.random_stream(engine.module).step == 2


def test_full_precision_and_evaluation_are_not_told(caplog):
    engine = make(net())
    engine.eval()
    engine(torch.ones(2, 16))
    engine.train()
    step(engine)
    assert not [record for record in caplog.records if TOLD in record.message]


def test_a_model_that_has_trained_before_and_a_copy_of_it_are_looked_at_again(caplog):
    model = net()
    model(torch.ones(2, 16)).sum().backward()
    engine = make(copy.deepcopy(model), bf16={"enabled": True})
    step(engine)
    step(make(model, bf16={"enabled": True}))
    assert sum(TOLD in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"recipe": "mxfp4"}, "megalowbit.recipe is 'mxfp4', and layer 0 has 'nvfp4'"),
        ({"grad_scaler": {"type": "dynamic"}}, "megalowbit.grad_scaler = {'type': 'dynamic'} is acted on by"),
        ({"precision": "fp16"}, "megalowbit.precision is 'fp16', and the engine computes in bf16"),
    ],
)
def test_a_block_that_nobody_acts_on_ends_the_first_forward(block, said):
    engine = make(net(), bf16={"enabled": True}, megalowbit=block)
    for _ in range(2):
        with pytest.raises(UserError) as seen:
            step(engine)
        assert str(seen.value).startswith(said)


def test_a_block_that_agrees_trains():
    engine = make(net(), bf16={"enabled": True}, megalowbit={"recipe": "nvfp4", "precision": "bf16"})
    step(engine)


def test_layers_that_were_replaced_are_missed():
    model = net()
    engine = make(model, bf16={"enabled": True})
    model[1] = nn.Linear(16, 16).bfloat16()
    with pytest.raises(UserError, match=r"1 of 2 low-bit layers were replaced .*\(1 is Linear\)"):
        step(engine)


def test_an_optimizer_of_ours_in_a_stock_engine_is_refused():
    model = net().bfloat16()
    settings = mlb.OptimizerConfig(lr=0.1, bf16=True, params_have_main_grad=False)
    engine = make(model, optimizer=mlb.get_megatron_optimizer(model, settings))
    with pytest.raises(UserError, match="is stepped by an engine of stock DeepSpeed"):
        step(engine)


def test_an_unconverted_model_is_refused_where_a_script_asks():
    engine = make(net(None), megalowbit={"recipe": "nvfp4"})
    with pytest.raises(UserError, match="Sequential has no low-bit layers"):
        check_training(engine)


def test_engines_of_ours_are_left_alone(caplog):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "megalowbit": {"recipe": "nvfp4", "precision": "bf16", "log_num_zeros_in_grad": True},
    }
    engine = mlb.initialize(model=net(None), config=config)[0]
    step(engine)
    check_training(engine)
    assert not [record for record in caplog.records if TOLD in record.message]


@pytest.mark.skipif(not get_accelerator().is_fp16_supported(), reason="DeepSpeed refuses fp16 on this CPU")
def test_stock_fp16_at_stage_zero_never_scales_the_loss():
    """docs/other-loops.md says so; once this fails, DeepSpeed has mended it."""
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = make(
        model, optimizer=sgd, fp16={"enabled": True, "initial_scale_power": 4}, gradient_clipping=0.0
    )
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 2).half()).sum())
    engine.step()
    assert (model.weight - before).tolist() == [[-1 / 16, -1 / 16]]
