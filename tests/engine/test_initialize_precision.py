"""`autocast` and `fp32_norms` of the configuration, in a real engine."""

import pytest
import torch
from torch import nn

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Model(nn.Module):
    """Records the dtypes in which its values are computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.seen = {}

    def forward(self, x):
        hidden = self.first(x)
        normed = self.norm(hidden)
        scores = torch.softmax(normed, -1)
        self.seen = {"hidden": hidden.dtype, "normed": normed.dtype, "scores": scores.dtype}
        return self.last(normed + scores)


def config(precision, **block):
    scaler = {"grad_scaler": {"type": "constant", "scale": 64.0}} if precision == "fp16" else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "megalowbit": {"precision": precision, **scaler, **block},
    }


def train(engine, steps=30):
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 4, generator=generator)
        loss = (
            (engine(x.to(engine.module.first.weight.dtype)).float() - x.sum(1, keepdim=True)).square().mean()
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", DTYPES)
def test_autocast_and_fp32_norms_set_the_computed_types_and_train(precision):
    half = DTYPES[precision]
    engine, optimizer, _, _ = initialize(
        model=Model(), config=config(precision, autocast=True, fp32_norms=True)
    )
    losses = train(engine)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert engine.skipped_steps == 0
    assert engine.module.seen == {"hidden": half, "normed": half, "scores": torch.float32}
    dtypes = {name: parameter.dtype for name, parameter in engine.module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"norm.weight", "norm.bias"}
    assert set(dtypes.values()) == {half, torch.float32}
    assert sum(len(group) for group in optimizer.fp32_from_fp32_groups) == 2
    engine.eval()
    with torch.no_grad():
        engine(torch.randn(4, 4).to(half))
    assert engine.module.seen["scores"] == torch.float32


def test_both_are_off_by_default():
    engine, optimizer, _, _ = initialize(model=Model(), config=config("fp16"))
    train(engine, steps=1)
    assert set(engine.module.seen.values()) == {torch.float16}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float16}
    assert not any(optimizer.fp32_from_fp32_groups)


def test_changes_of_the_autocast_table_take_effect():
    engine, _, _, _ = initialize(
        model=Model(), config=config("bf16", autocast={"float32": ["linear"], "float16": ["softmax"]})
    )
    train(engine, steps=1)
    assert engine.module.seen == {"hidden": torch.float32, "normed": torch.float32, "scores": torch.bfloat16}


def test_frozen_norms_stay_fp32_as_well():
    model = Model()
    model.norm.requires_grad_(False)
    engine, _, _, _ = initialize(model=model, config=config("fp16", fp32_norms=True))
    train(engine, steps=1)
    assert engine.module.norm.weight.dtype == torch.float32
    assert engine.module.first.weight.dtype == torch.float16


def test_fp32_norms_are_rejected_for_a_model_without_norms():
    with pytest.raises(UserError, match="no norm to keep in fp32"):
        initialize(model=nn.Linear(4, 1), config=config("bf16", fp32_norms=True))


def test_a_resumed_run_with_fp32_norms_continues_bit_for_bit(tmp_path):
    block = {"autocast": True, "fp32_norms": True}
    first, _, _, _ = initialize(model=Model(), config=config("bf16", **block))
    train(first, steps=3)
    first.save_checkpoint(str(tmp_path), tag="t")
    again, _, _, _ = initialize(model=Model(), config=config("bf16", **block))
    again.load_checkpoint(str(tmp_path), tag="t")
    assert again.module.norm.weight.dtype == torch.float32
    assert train(first, steps=3) == train(again, steps=3)
    for one, other in zip(first.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other)
