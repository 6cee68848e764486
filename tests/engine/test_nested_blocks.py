import pytest
import torch

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError


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


def test_a_key_deep_in_a_block_is_named_with_its_block():
    with pytest.raises(UserError, match=r"DeepSpeed rejects csv_monitor\.enabledd = False .*: correct it"):
        initialize(model=model(), config=config(csv_monitor={"enabled": False, "enabledd": False}))
