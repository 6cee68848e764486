import pytest

from megalowbit.config.optimizer import fill_optimizer, fill_scheduler
from megalowbit.errors import UserError


def filled(kind, **params):
    config = {"optimizer": {"type": kind, "params": params}}
    fill_optimizer(config)
    return config["optimizer"]


def scheduler(kind, *, total_steps=None, lr=0.1, **params):
    config = {"optimizer": {"params": {"lr": lr}}, "scheduler": {"type": kind, "params": params}}
    fill_scheduler(config, total_steps)
    return config["scheduler"]["params"]


def test_auto_values_are_the_documented_ones():
    params = filled("adamw", lr="auto", betas="auto", eps="auto", weight_decay="auto")["params"]
    assert (params["lr"], params["betas"], params["eps"], params["weight_decay"]) == (
        3e-4,
        [0.9, 0.95],
        1e-8,
        0.1,
    )


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdmaW", {}, "unknown optimizer.type 'AdmaW': did you mean 'AdamW'"),
        (["AdamW"], {}, r"unknown optimizer.type \['AdamW'\]"),
        ({"AdamW": 1}, {}, "unknown optimizer.type"),
        ("AdamW", {"lr": 10**400}, "optimizer.params.lr = 1000"),
        ("FusedAdam", {}, 'use "AdamW"'),
        ("DeepSpeedCPUAdam", {}, 'use "AdamW"'),
        ("AdamW", {"learning_rate": 1}, "unknown key 'optimizer.params.learning_rate'"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping instead"),
        ("AdamW", {"lr": -1}, r"optimizer.params.lr = -1"),
        ("AdamW", {"lr": True}, "optimizer.params.lr = True is not valid: write a number"),
        ("AdamW", {"betas": [0.9, False]}, "optimizer.params.betas = .* write a number"),
        ("SGD", {"momentum": False}, "optimizer.params.momentum = False"),
        ("AdamW", {"lr": float("nan")}, "optimizer.params.lr = nan"),
        ("AdamW", {"betas": [0.9, 1.0]}, "betas"),
        ("AdamW", {"betas": [0.9]}, "betas"),
        ("AdamW", {"amsgrad": "auto"}, "amsgrad = 'auto'"),
        ("AdamW", {"bias_correction": False}, "bias_correction"),
        ("SGD", {"nesterov": True}, "needs momentum"),
        ("SGD", {"betas": [0.9, 0.99]}, "unknown key 'optimizer.params.betas'"),
    ],
)
def test_wrong_optimizers_are_refused_by_key(kind, params, message):
    with pytest.raises(UserError, match=message):
        filled(kind, **params)


def test_auto_of_a_warmup_follows_lr_and_steps():
    params = scheduler(
        "WarmupDecayLR", total_steps=500, lr=0.25,
        warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps="auto",
    )  # fmt: skip
    assert params == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 0.25, "warmup_num_steps": 5, "total_num_steps": 500
    }  # fmt: skip


def test_no_scheduler_is_fine():
    config = {"scheduler": None}
    fill_scheduler(config, None)
    assert config == {}


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecay", {}, "unknown scheduler.type 'WarmupDecay'"),
        ("WarmupLR", {"warmup_steps": 3}, "unknown key 'scheduler.params.warmup_steps'"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "needs the number of steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps = 0"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps = True is not valid: write a number"),
        ("WarmupLR", {"warmup_max_lr": True}, "warmup_max_lr = True"),
        ("MultiStepLR", {"milestones": [1, True]}, "milestones = "),
        ("WarmupLR", {"warmup_max_lr": -1}, "must be a finite number ≥ 0"),
        ("WarmupLR", {"warmup_max_lr": 10**400}, "warmup_max_lr = 1000.* must be a finite number"),
        ("WarmupLR", {"warmup_max_lr": "a"}, "warmup_max_lr = 'a' must be a finite number"),
        ("WarmupLR", {"warmup_num_steps": 10**400}, "warmup_num_steps = 1000.* must be a finite number"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps = 2.5 must be a whole number"),
        ("WarmupDecayLR", {"total_num_steps": 10**400}, "total_num_steps = 1000.* must be a finite number"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 1.5}, r"cos_min_ratio = 1.5 .* \[0, 1\]"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 10**400}, "cos_min_ratio = 1000"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": [0.1]}, r"cos_min_ratio = \[0.1\]"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_min_ratio": "0"}, "warmup_min_ratio = '0'"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_min_ratio": None}, "warmup_min_ratio = None"),
        ("StepLR", {"step_size": 0}, "step_size = 0 must be a whole number"),
        ("MultiStepLR", {"milestones": [1, "2"]}, "milestones"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, "must be true or false"),
        ("WarmupLR", {"warmup_type": ["log"]}, "unknown scheduler.params.warmup_type"),
        (["WarmupLR"], {}, r"unknown scheduler.type \['WarmupLR'\]"),
        ({}, {}, "unknown scheduler.type {}"),
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type"),
        ("StepLR", {"step_size": "auto"}, "cannot be filled in"),
    ],
)
def test_wrong_schedulers_are_refused_by_key(kind, params, message):
    with pytest.raises(UserError, match=message):
        scheduler(kind, **params)


def test_switches_stay_switches():
    assert filled("AdamW", amsgrad=True)["params"]["amsgrad"] is True
    assert filled("SGD", nesterov=True, momentum=0.5)["params"]["nesterov"] is True
    assert scheduler("LRRangeTest", lr_range_test_staircase=True) == {"lr_range_test_staircase": True}


@pytest.mark.parametrize("block", ["AdamW", {"type": "AdamW", "parms": {}}, {"type": "AdamW", "params": [1]}])
def test_a_block_of_another_shape_is_refused(block):
    with pytest.raises(UserError, match="optimizer"):
        fill_optimizer({"optimizer": block})


@pytest.mark.parametrize("params", [0, "", [], False])
@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_empty_params_of_another_type_are_refused_and_null_is_none(name, params):
    fill = {"optimizer": fill_optimizer, "scheduler": lambda config: fill_scheduler(config, None)}[name]
    kind = {"optimizer": "AdamW", "scheduler": "WarmupLR"}[name]
    with pytest.raises(UserError, match=f"^{name}.params = .* must be an object"):
        fill({name: {"type": kind, "params": params}})
    fill({name: {"type": kind, "params": None}})


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_max_lr": None, "warmup_type": "linear"}),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 0, "warmup_min_ratio": 1}),
        ("OneCycle", {"cycle_min_lr": [0.1], "cycle_max_lr": 1, "cycle_second_step_size": None}),
        ("OneCycleLR", {"max_lr": [0.1, 0.2], "anneal_strategy": "linear", "cycle_momentum": False}),
        ("MultiStepLR", {"milestones": [3, 5]}),
    ],
)
def test_every_shape_a_scheduler_takes_passes_unchanged(kind, params):
    assert scheduler(kind, **params) == params
