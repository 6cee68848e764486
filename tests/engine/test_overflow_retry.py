import random

import numpy as np
import pytest
import torch

from megalowbit.engine.initialize import initialize
from megalowbit.engine.overflow_retry import COUNTERS, retry_engine_step
from megalowbit.errors import UserError

RIGHT = 2.0**11  # with a larger scale, gradients overflow


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        x = x * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        # the sum of two micro-batches is about 20; the largest fp16 number is 65504
        return self.second(hidden).float().square().mean() + 40 * self.second.bias.float()[0]


def make(initial_scale):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
        "megalowbit": {
            "precision": "fp16",
            "recipe": "nvfp4",
            "grad_scaler": {"initial_scale": initial_scale, "max_scale": 2.0**32, "hysteresis": 2},
        },
    }
    engine, *_ = initialize(model=Model(), config=config)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    return engine


def train(initial_scale, max_retries, steps=4):
    engine = make(initial_scale)
    losses, retries = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(4, 32, generator=generator).half() for _ in range(2)]

        def run(batches=batches):
            found = []
            for batch in batches:
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

        loss, attempts = retry_engine_step(engine, run, max_retries=max_retries)
        losses.append(loss)
        retries.append(attempts)
    facts = {name: getattr(engine, name) for name in COUNTERS} | {"lr": engine.get_lr()}
    weights = [parameter.tolist() for parameter in engine.module.parameters()]
    numbers = (random.random(), np.random.rand(), torch.rand(()).item(), engine.module.seen.item())
    return losses, retries, facts, weights, numbers, engine


def test_a_run_with_retries_equals_one_that_began_at_the_right_scale():
    found, expected = train(RIGHT * 8, 5), train(RIGHT, 0)
    assert expected[1] == [0, 0, 0, 0]
    assert expected[2]["skipped_steps"] == 0
    assert found[1] == [3, 0, 0, 0]
    for mine, other in zip(found[:1] + found[2:5], expected[:1] + expected[2:5], strict=True):
        assert mine == other
    assert found[2] == {**found[2], "global_steps": 4, "micro_steps": 8, "global_samples": 32}


def test_a_step_that_never_succeeds_counts_as_one_skipped_step():
    _, retries, facts, _, _, engine = train(RIGHT * 2**10, 2, steps=1)
    assert retries == [2]
    assert (facts["global_steps"], facts["skipped_steps"], facts["micro_steps"]) == (1, 1, 2)
    assert not engine.was_step_applied()
    # one octave for each retry; after the last attempt only hysteresis decides
    assert engine.optimizer.loss_scale <= RIGHT * 2**8


def test_a_retry_cannot_start_in_the_middle_of_accumulation():
    engine = make(RIGHT)
    engine.backward(engine(torch.randn(4, 32).half()))
    engine.step()
    with pytest.raises(UserError, match="1 of 2 are done"):
        retry_engine_step(engine, lambda: None, max_retries=1)
