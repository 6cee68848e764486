import pytest
import torch

from megalowbit.engine.optimizer_settings import build_optimizer, fill_optimizer, fill_scheduler
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
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),  # DeepSpeed's Adam decouples weight decay unless told not to
        ("adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ],
)
def test_the_optimizer_is_torchs_fused_one_and_steps(kind, params, expected):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(filled(kind, lr=0.1, **params), [{"params": [parameter]}])
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["fused"]
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all()


def test_a_groups_own_weight_decay_wins():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.0}]
    assert build_optimizer(filled("AdamW", weight_decay=0.3), groups).param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdmaW", {}, "unknown optimizer.type 'AdmaW': did you mean 'AdamW'"),
        ("FusedAdam", {}, 'use "AdamW"'),
        ("DeepSpeedCPUAdam", {}, 'use "AdamW"'),
        ("AdamW", {"learning_rate": 1}, "unknown key 'optimizer.params.learning_rate'"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping instead"),
        ("AdamW", {"lr": -1}, r"optimizer.params.lr = -1"),
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
        ("WarmupLR", {"warmup_max_lr": -1}, "must be finite and ≥ 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type"),
        ("StepLR", {"step_size": "auto"}, "cannot be filled in"),
    ],
)
def test_wrong_schedulers_are_refused_by_key(kind, params, message):
    with pytest.raises(UserError, match=message):
        scheduler(kind, **params)


@pytest.mark.parametrize("block", ["AdamW", {"type": "AdamW", "parms": {}}, {"type": "AdamW", "params": [1]}])
def test_a_block_of_another_shape_is_refused(block):
    with pytest.raises(UserError, match="optimizer"):
        fill_optimizer({"optimizer": block})
