import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from megalowbit.config.zero import zero_stage
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError


def config(stage, precision="bf16"):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": precision},
    }


@pytest.mark.parametrize(("block", "stage"), [({}, 0), ({"stage": None}, 0), ({"stage": 3}, 3)])
def test_the_stage_of_a_configuration(block, stage):
    assert zero_stage({"zero_optimization": block}) == stage
    assert zero_stage({}) == 0


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_model_is_cast_and_masters_keep_their_bits(stage, precision, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    exact = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine, *_ = initialize(model=model, config=config(stage, precision))
    assert {p.dtype for p in engine.module.parameters()} == {dtype}
    assert engine.module[1].running_mean.dtype == torch.float32
    for name, parameter in engine.module.named_parameters():
        if name in exact:
            assert torch.equal(safe_get_full_fp32_param(parameter), exact[name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_in_half_precision_keeps_its_weights(stage):
    model = torch.nn.Linear(5, 3).bfloat16()
    expected = model.weight.detach().float()
    engine, *_ = initialize(model=model, config=config(stage))
    assert torch.equal(safe_get_full_fp32_param(engine.module.weight), expected)


def test_a_group_of_frozen_parameters_only_is_left_out():
    model = torch.nn.Linear(5, 3)
    model.bias.requires_grad_(False)
    groups = [{"params": [model.bias]}, {"params": [model.weight]}]
    engine, *_ = initialize(model=model, config=config(1), model_parameters=groups)
    assert len(engine.optimizer.param_groups) == 1


def test_a_partitioned_model_is_rejected():
    model = torch.nn.Linear(5, 3)
    model.weight.ds_id = 0
    with pytest.raises(
        UserError, match=r"^parameter weight is already partitioned, by deepspeed\.zero\.Init"
    ):
        initialize(model=model, config=config(3))
