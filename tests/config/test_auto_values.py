"""What is said of `"auto"` values that nobody gave."""

import copy
import logging

import pytest
import torch

import megalowbit as mlb
from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.engine.initialize import _warn_of_guesses

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def guesses(**config):
    base = {MICRO: 2, "optimizer": copy.deepcopy(ADAM)}
    return list(read_deepspeed_config({**base, **config}, total_steps=200).guesses)


def test_only_optimizer_values_left_auto_are_logged():
    params = {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"}
    assert guesses(optimizer={"type": "AdamW", "params": params}) == [
        "optimizer.params.lr = 0.0003",
        "optimizer.params.betas = [0.9, 0.95]",
        "optimizer.params.weight_decay = 0.1",
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": "auto", MICRO: "auto", STEPS: "auto"}, [MICRO, STEPS]),
        ({"train_batch_size": "auto", MICRO: "auto", STEPS: 4}, [MICRO]),
        ({"train_batch_size": "auto", MICRO: 4, STEPS: "auto"}, [STEPS]),
        ({"train_batch_size": "auto", MICRO: 4}, []),
        ({"train_batch_size": 8, MICRO: "auto", STEPS: 4}, []),
        ({"train_batch_size": 8, MICRO: 4, STEPS: "auto"}, []),
        ({"train_batch_size": 8, MICRO: "auto", STEPS: "auto"}, [STEPS]),
    ],
)
def test_a_batch_size_that_follows_from_the_others_is_no_guess(sizes, expected):
    assert guesses(**sizes) == [f"{key} = 1" for key in expected]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({"bf16": {"enabled": "auto"}}, ["bf16.enabled = true (it trains in bf16)"]),
        ({"fp16": {"enabled": "auto"}}, ["fp16.enabled = false (it trains in bf16)"]),
        (
            {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
            ["fp16.enabled = false, bf16.enabled = true (it trains in bf16)"],
        ),
        (
            {"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}},
            ["bf16.enabled = false (it trains in fp32)"],
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, []),
        ({"bf16": {"enabled": "auto"}, "megalowbit": {"precision": "fp32"}}, []),
        ({"bf16": {"enabled": True}}, []),
    ],
)
def test_a_precision_left_auto_is_logged(blocks, expected):
    assert guesses(**blocks) == expected


def test_of_a_scheduler_what_follows_from_rate_and_steps_is_left_out():
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    expected = ["gradient_clipping = 1.0", "scheduler.params.warmup_num_steps = 2"]
    assert guesses(scheduler=scheduler, gradient_clipping="auto") == expected


def test_initialize_logs_all_auto_values_in_one_line_on_one_rank(caplog, monkeypatch):
    settings = {MICRO: "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with caplog.at_level(logging.WARNING):
        mlb.initialize(model=torch.nn.Linear(4, 4), config=copy.deepcopy(settings))
        [line] = [each.message for each in caplog.records if each.name == "megalowbit.engine.initialize"]
        assert f"{MICRO} = 1, optimizer.params.lr = 0.0003; set these values" in line
        caplog.clear()
        monkeypatch.setattr("megalowbit.distributed.process_group.rank", lambda: 1)
        _warn_of_guesses(read_deepspeed_config(settings))
        assert not caplog.records
