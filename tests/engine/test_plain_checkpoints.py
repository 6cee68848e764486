"""Checkpoints of stock DeepSpeed are rejected, and the remedy that the error names works."""

import re

import deepspeed
import pytest
import torch
from small_engines import config, model

import megalowbit as mlb
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import read_config
from megalowbit.hf.settings import ModelSettings


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_the_error_for_a_plain_checkpoint_names_a_remedy_that_works(stage, tmp_path):
    start_process_group()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    net = model()
    expected = {name: value.detach().clone() for name, value in net.state_dict().items()}
    stock, *_ = deepspeed.initialize(model=net, config=settings, model_parameters=net.parameters())
    stock.save_checkpoint(str(tmp_path), tag="plain")
    engine, *_ = mlb.initialize(model=model(), config=config(zero_optimization={"stage": stage}))
    with pytest.raises(UserError, match=r"has no manifest\.json: .* take its weights: ") as caught:
        engine.load_checkpoint(str(tmp_path), tag="plain")
    for folder in (tmp_path, tmp_path / "plain"):
        with pytest.raises(UserError, match="take its weights: "):
            read_config(ModelSettings(checkpoint=folder))

    (way,) = re.findall(r"model\.load_state_dict\((.*)\), then mlb\.initialize", str(caught.value))
    weights = eval(way, {"torch": torch, "deepspeed": deepspeed})
    target = model()
    for parameter in target.parameters():
        parameter.data.zero_()
    target.load_state_dict(weights)
    for name, value in target.state_dict().items():  # DeepSpeed initialises its masters from rounded weights
        assert torch.equal(value, expected[name].bfloat16().float())
