"""Engines of one small model at every ZeRO stage and precision, and their masters."""

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from megalowbit.engine.initialize import initialize

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STAGES = ["0", "1", "2", "3", "1 offload", "2 offload", "3 offload"]
# runs in `make test`: each precision and each optimizer class of DeepSpeed, with and without offload
QUICK = {"0": "fp16", "2": "bf16", "3": "fp32", "1 offload": "fp16"}
S = 64.0  # the loss scale in fp16


every_stage = pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage in QUICK else pytest.mark.slow) for stage in STAGES]
)
every_stage_and_precision = pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(stage, precision, marks=() if QUICK.get(stage) == precision else pytest.mark.slow)
        for stage in STAGES
        for precision in DTYPES
    ],
)


def make(stage, precision="bf16", *, micro_batches=1, clip=0.1):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    zero = {"stage": int(stage[0]), "stage3_param_persistence_threshold": 0}
    if "offload" in stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        "megalowbit": {"precision": precision},
    }
    if precision == "fp16":
        config["megalowbit"]["grad_scaler"] = {"type": "constant", "scale": S}
    return initialize(model=net, config=config)[0]


def backward(engine, times=1.0, seed=0):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    x = x.to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().sum() * times)


def masters(engine):
    return [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]


def same(engine, twin):
    pairs = zip(masters(engine), masters(twin), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)
