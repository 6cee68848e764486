"""An engine at stage 0 for the tests of DeepSpeed's interfaces.

To try a new DeepSpeed, install it and run this folder first: each test covers one interface that we
rely on, and its message says what breaks without it. `test_index.py` checks that none is missing.
"""

import pytest
import torch

from megalowbit.engine.initialize import initialize


@pytest.fixture
def engine():
    """Two micro-batches a step, bf16, SGD at 1.0 that halves, norm clipped to 0.5."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=torch.nn.Linear(2, 1, bias=False), config=config)[0]


@pytest.fixture
def micro_step():
    """`micro_step(engine, value=1.0)`: one micro-batch of that value."""

    def take(engine, value=1.0):
        engine.backward(engine(torch.full((1, 2), value).bfloat16()).float().sum())
        engine.step()

    return take
