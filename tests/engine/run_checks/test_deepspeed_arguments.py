import argparse
import copy
import inspect
import json
import os
from datetime import timedelta

import deepspeed
import pytest
import torch
from small_engines import config, model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import megalowbit as mlb
from megalowbit.engine.process_start import start_process_group
from megalowbit.engine.run_checks.deepspeed_arguments import hidden_size_of
from megalowbit.errors import UserError

OF_OUR_OWN = ["seed", "total_steps", "timeout", "weights"]
# the ZeRO 3 example from transformers' documentation, unchanged
HF_ZERO_3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def gpt2(width=32):
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_the_signature_begins_with_that_of_deepspeed():
    ours = list(inspect.signature(mlb.initialize).parameters.values())
    theirs = list(inspect.signature(deepspeed.initialize).parameters.values())
    assert [each.name for each in ours[: len(theirs)]] == [each.name for each in theirs], (
        "deepspeed.initialize takes other arguments: each must do here what it does there, or be refused"
    )
    assert {each.kind for each in ours[: len(theirs)]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [each.name for each in ours[len(theirs) :]] == OF_OUR_OWN
    assert {each.kind for each in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


def trained(*arguments, **named):
    """Weights after one step."""
    engine, *_ = mlb.initialize(*arguments, **named)
    engine.backward(engine(torch.ones(2, 32).bfloat16()).float().sum())
    engine.step()
    return torch.cat([parameter.flatten() for parameter in engine.module.parameters()])


def test_a_configuration_may_be_passed_in_every_way_that_deepspeed_supports(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    expected = trained(model=model(), config=config())
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=-1)
    for found in (
        trained(args, model()),
        trained(model=model(), config_params=config()),
        trained(args=argparse.Namespace(deepspeed_config=None, deepscale_config=path), model=model()),
        trained(None, model(), None, None, None, None, 29501, None, None, None, str(path)),
    ):
        assert torch.equal(found, expected)
    assert args.local_rank == 0, "scripts read their local rank there"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(4, 32), "training_data is a Tensor: pass a data set, such as list"),
        (
            torch.utils.data.DataLoader(list(torch.zeros(4, 32))),
            "training_data is a DataLoader: pass its data",
        ),
        (iter(()), "training_data is a tuple_iterator: pass a torch.utils.data.Dataset"),
    ],
)
def test_training_data_that_deepspeed_would_fail_on_later_is_rejected(data, message):
    with pytest.raises(UserError, match=message):
        mlb.initialize(model=model(), config=config(), training_data=data)


def test_the_port_argument_is_used_if_the_environment_sets_none(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    trained(model=model(), config=config(), distributed_port=29555)
    assert os.environ["MASTER_PORT"] == "29555"
    trained(model=model(), config=config(), distributed_port=29556)
    assert os.environ["MASTER_PORT"] == "29555"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": None}, "^config is missing: pass a path or a dict as config="),
        (
            {"config_params": {}},
            "given as config and as config_params: pass one of them",
        ),
        ({"args": argparse.Namespace(deepspeed_config="x")}, "as config and as args.deepspeed_config"),
        ({"config": 3}, "^config is a int: pass the path"),
        ({"model": None}, "^model is missing: pass a torch.nn.Module"),
        ({"model": [model()]}, "^model is a list: pass a torch.nn.Module"),
        ({"args": model()}, "^the first argument is args, .* pass it as model="),
        ({"mesh_param": (1, 2)}, r"^mesh_param = \(1, 2\) cannot be used: sequence parallelism"),
        ({"distributed_port": True}, "^distributed_port must be a whole number from 1 to 65535, not True"),
        ({"seed": True}, "^seed must be a whole number"),
        ({"total_steps": True}, "^total_steps must be a whole number ≥ 1, not True"),
        ({"total_steps": 0}, "^total_steps must be a whole number ≥ 1, not 0"),
        ({"timeout": 30}, r"^timeout is 30: pass a datetime\.timedelta"),
        ({"config": {**config(), "x": 1e400}}, "unknown key 'x'"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(UserError, match=message):
        mlb.initialize(**{"model": model(), "config": config(), **arguments})


def test_the_zero_3_configuration_of_transformers_runs_unchanged():
    net = gpt2()
    before = copy.deepcopy(HF_ZERO_3)
    engine, *_ = mlb.initialize(model=net, config=HF_ZERO_3, total_steps=200)
    assert before == HF_ZERO_3
    tokens = torch.arange(16).view(1, 16)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    assert engine.zero_optimization_stage() == 3
    assert engine.lr_scheduler.warmup_num_steps == 2


def test_auto_sizes_equal_those_of_transformers():
    source = inspect.getsource(HfTrainerDeepSpeedConfig.trainer_config_finalize)
    for size in ("hidden_size * hidden_size)", "int(0.9 * hidden_size * hidden_size)", "10 * hidden_size,"):
        assert size in source, "zero_values.SIZES are not those of this transformers"
    engine, *_ = mlb.initialize(model=gpt2(width=48), config=HF_ZERO_3, total_steps=200)
    block = engine.config["zero_optimization"]
    assert [block[key] for key in SIZES] == [2304, 2073, 480]


def test_a_model_without_a_hidden_size_names_each_key_that_it_cannot_fill():
    with pytest.raises(UserError) as caught:
        mlb.initialize(model=model(), config=HF_ZERO_3, total_steps=200)
    for key in SIZES:
        assert f"zero_optimization.{key} = 'auto' cannot be filled in: write its value" in str(caught.value)
    with pytest.raises(UserError, match=r"warmup_num_steps = 'auto' needs .* pass total_steps= to mlb"):
        mlb.initialize(model=gpt2(), config=HF_ZERO_3)


def test_the_hidden_size_is_found_where_transformers_looks():
    def of(**fields):
        net = torch.nn.Linear(1, 1)
        net.config = argparse.Namespace(**fields)
        return hidden_size_of(net)

    assert of(hidden_size=8) == 8
    assert of(hidden_sizes=[8, 32, 16]) == 32
    assert of(text_config=argparse.Namespace(hidden_size=6)) == 6
    assert of(n_layer=3) is None
    assert hidden_size_of(gpt2(width=16)) == 16
    assert hidden_size_of(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_a_model_from_zero_init_is_rejected_by_name(stage, recipe):
    start_process_group()
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}):
        net = gpt2()
    message = r"transformer\.wte\.weight is already partitioned, .*outside of zero\.Init"
    with pytest.raises(UserError, match=message):
        mlb.initialize(model=net, config=config(recipe, zero_optimization={"stage": stage}))
    with pytest.raises(UserError, match=r"outside of zero\.Init"):
        mlb.convert(net)


def test_a_timeout_and_steps_of_the_right_kinds_pass():
    trained(model=model(), config=config(), timeout=timedelta(minutes=5), total_steps=3, seed=-1)
