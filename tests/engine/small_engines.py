"""Models of two linear layers, their configuration, and engines that train them on seeded data."""

import torch

from megalowbit.engine.initialize import initialize

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def config(recipe=None, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "megalowbit": {"precision": "bf16", "recipe": recipe},
        **changes,
    }


def make_engine(stage=0, *, optimizer=ADAMW, width=16, seed=0, micro_batches=1, **block):
    """An engine in bf16.

    Args:
        stage: the ZeRO stage.
        optimizer: its configuration.
        width: features between the two layers; inputs and outputs have 16.
        seed: of the weights.
        micro_batches: per optimizer step.
        block: more keys of `"megalowbit"`.
    """
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 16))
    settings = config(
        gradient_accumulation_steps=micro_batches,
        optimizer=optimizer,
        zero_optimization={"stage": stage},
        megalowbit={"precision": "bf16", **block},
    )
    return initialize(model=net, config=settings)[0]


def step(engine, seed):
    """One micro-batch through an engine whose first layer is linear; returns its loss."""
    features = engine.module[0].in_features
    x = torch.randn(2, features, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def trained(stage=0, **settings):
    """`make_engine`, after two steps."""
    engine = make_engine(stage, **settings)
    step(engine, 0)
    step(engine, 1)
    return engine
