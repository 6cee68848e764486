"""What the programs of this folder share: a tiny model with dropout, its data, one step, the report."""

import json
import os
from pathlib import Path

import torch

from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import stop_process_group

HIDDEN, WIDTH, BATCH = 8, 16, 4


class TinyModel(torch.nn.Module):
    """Regression of the sum of the inputs; computes in the type of its weights, its loss in fp32."""

    def __init__(self, dropout: float = 0.0, seed: int = 0, vocabulary: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(WIDTH, 1),
        )
        self.ballast = torch.nn.Embedding(vocabulary, WIDTH) if vocabulary else None

    def forward(self, x):
        target = x.sum(1, keepdim=True)
        y = self.body(x.to(self.body[0].weight.dtype))
        if self.ballast is not None:
            y = y + self.ballast(torch.zeros(len(x), dtype=torch.long)).sum(1, keepdim=True)
        return (y.float() - target).square().mean()


def data(step, micro_batch, rank, world_size):
    """A batch that depends on nothing but its place in the run."""
    generator = torch.Generator().manual_seed((step * 16 + micro_batch) * world_size + rank)
    return torch.randn(BATCH, HIDDEN, generator=generator)


def config(precision="fp16", *, steps=1, optimizer=None, clipping=0.0, scaler=None, scheduler=None):
    block = {"precision": precision}
    if scaler is not None:
        block["grad_scaler"] = scaler
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": clipping,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        **({"scheduler": scheduler} if scheduler else {}),
        "megalowbit": block,
    }


def make(model, settings, **arguments):
    torch.set_num_threads(1)
    return initialize(model=model, config=settings, **arguments)


def rank_and_size():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_step(engine, step, spoil=None):
    """One optimizer step; `spoil(engine)` may damage gradients before they are reduced."""
    rank, world_size = rank_and_size()
    losses = []
    for micro_batch in range(engine.gradient_accumulation_steps()):
        loss = engine(data(step, micro_batch, rank, world_size))
        if spoil is not None and engine.is_gradient_accumulation_boundary():
            spoil(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def facts(engine):
    return {
        "lr": engine.get_lr(),
        "norm": engine.get_global_grad_norm(),
        "scale": engine.optimizer.loss_scale,
        "skipped": engine.skipped_steps,
    }


def weights(engine):
    """All weights as numbers that JSON keeps exactly."""
    return [p.detach().double().flatten().tolist() for p in engine.module.parameters()]


def report(result):
    rank, _ = rank_and_size()
    (Path(os.environ["RESULTS"]) / f"rank{rank}.json").write_text(json.dumps(result))
    stop_process_group()  # or a rank may die in its exit of what the others have closed already
