"""A converted model in an engine of `deepspeed.initialize`: an error, or a single warning."""

import copy
import logging

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.layers.conversion.other_loops import check_training, find_engine

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


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_the_engine_around_a_model_is_found(stage):
    model = net()
    engine = make(model, stage=stage, bf16={"enabled": True})
    assert find_engine(model) is engine, "the hook of DeepSpeed's engine no longer leads to it"
    check_training(engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_half_precision_is_warned_about_once(stage, caplog):
    engine = make(net(), stage=stage, bf16={"enabled": True})
    with caplog.at_level(logging.WARNING):
        step(engine)
        step(engine)
    assert sum(TOLD in record.message for record in caplog.records) == 1
    assert mlb.random_stream(engine.module).step == 2


def test_full_precision_and_evaluation_give_no_warning(caplog):
    engine = make(net())
    engine.eval()
    engine(torch.ones(2, 16))
    engine.train()
    step(engine)
    assert not [record for record in caplog.records if TOLD in record.message]


def test_a_model_that_has_trained_before_and_its_copy_are_checked_again(caplog):
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
        (
            {"grad_scaler": {"type": "dynamic"}},
            "megalowbit.grad_scaler = {'type': 'dynamic'} only works with",
        ),
        ({"precision": "fp16"}, "megalowbit.precision is 'fp16', and the engine computes in bf16"),
    ],
)
def test_a_block_with_unsupported_settings_fails_the_first_forward(block, said):
    engine = make(net(), bf16={"enabled": True}, megalowbit=block)
    for _ in range(2):
        with pytest.raises(UserError) as seen:
            step(engine)
        assert str(seen.value).startswith(said)


def test_a_block_that_matches_the_model_trains():
    engine = make(net(), bf16={"enabled": True}, megalowbit={"recipe": "nvfp4", "precision": "bf16"})
    step(engine)


def test_replaced_low_bit_layers_are_reported():
    model = net()
    engine = make(model, bf16={"enabled": True})
    model[1] = nn.Linear(16, 16).bfloat16()
    with pytest.raises(UserError, match=r"1 of 2 low-bit layers were replaced .*\(1 is Linear\)"):
        step(engine)


def test_a_megalowbit_optimizer_in_a_stock_engine_is_rejected():
    model = net().bfloat16()
    settings = mlb.OptimizerConfig(lr=0.1, bf16=True, params_have_main_grad=False)
    engine = make(model, optimizer=mlb.get_megatron_optimizer(model, settings))
    with pytest.raises(UserError, match="is stepped by an engine of stock DeepSpeed"):
        step(engine)


def test_an_explicit_check_rejects_an_unconverted_model():
    engine = make(net(None), megalowbit={"recipe": "nvfp4"})
    with pytest.raises(UserError, match="Sequential has no low-bit layers"):
        check_training(engine)


def test_megalowbit_engines_pass_without_a_warning(caplog):
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
    """docs/other-loops.md says so; if this fails, DeepSpeed has fixed it."""
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = make(
        model, optimizer=sgd, fp16={"enabled": True, "initial_scale_power": 4}, gradient_clipping=0.0
    )
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 2).half()).sum())
    engine.step()
    assert (model.weight - before).tolist() == [[-1 / 16, -1 / 16]]


def gpt2(recipe="nvfp4"):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    mlb.convert(model, recipe)
    return model


def step_gpt2(engine):
    ids = torch.arange(32).view(2, 16)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


@pytest.mark.parametrize("gathers", [True, False])
def test_a_gpt2_at_stage_three_is_rejected_because_its_export_would_be_transposed(gathers):
    key = "stage3_gather_16bit_weights_on_model_save"
    engine = make(gpt2(), stage=3, bf16={"enabled": True}, zero_optimization={"stage": 3, key: gathers})
    for ask in (step_gpt2, check_training):
        with pytest.raises(UserError) as seen:
            ask(engine)
        assert str(seen.value) == (
            "at ZeRO stage 3 this engine and DeepSpeed's tools export the weight of "
            "transformer.h.0.attn.c_attn transposed (no error for square ones): use stage 2 or less, or make "
            "the engine with megalowbit.initialize"
        )


def test_split_weights_at_stage_three_are_rejected_and_plain_ones_train():
    engine = make(net({"base": "nvfp4", "parameter_split": {"rank": 2}}), stage=3, bf16={"enabled": True})
    with pytest.raises(UserError, match="export the weight of 0 without its split parts: use stage 2"):
        step(engine)
    step(make(net(), stage=3, bf16={"enabled": True}))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_exports_of_lower_stages_are_in_the_layout_of_transformers(stage, tmp_path):
    model = gpt2()
    engine = make(model, stage=stage, bf16={"enabled": True})
    step_gpt2(engine)
    assert engine.save_16bit_model(str(tmp_path))
    stored = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    weight = "transformer.h.0.attn.c_proj.weight"
    assert torch.equal(stored[weight], model.transformer.h[0].attn.c_proj.weight.t())
    # as Accelerate and Trainer do
    model.save_pretrained(tmp_path / "hf", state_dict=clone_tensors_for_torch_save(model.state_dict()))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "hf", dtype="auto").state_dict()
    mlb.restore(model)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
        assert torch.equal(stored[name], value), name
