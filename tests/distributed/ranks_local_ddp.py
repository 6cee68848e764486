"""Two ranks: replicas that start apart, their averaged gradients, overflow on one; see test_local_ddp.py."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.megatron import OptimizerConfig, get_megatron_optimizer

WIDTH, STEPS, MICRO_BATCHES, SCALE, LR, CLIP = 6, 8, 2, 64.0, 0.05, 0.5
BAD_STEP = 3  # rank 1 overflows then


class Model(torch.nn.Module):
    def __init__(self, seed, has_experts=False):
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1)
        self.register_buffer("offset", torch.randn(WIDTH))
        if has_experts:
            for parameter in self.body.parameters():
                parameter.allreduce = False

    def forward(self, x):
        hidden = torch.tanh(self.body(x.to(self.offset.dtype) + self.offset))
        return (self.head(hidden).flatten().to(x.dtype) - x.sum(1)).square().mean()


def data(step, micro_batch, rank):
    generator = torch.Generator().manual_seed((step * MICRO_BATCHES + micro_batch) * 2 + rank)
    return torch.randn(4, WIDTH, generator=generator)


def numbers(tensors):
    return [tensor.double().flatten().tolist() for tensor in tensors]


def train(rank):
    model = LocalDDP(Model(seed=rank).half())
    started = numbers([*model.parameters(), *model.buffers()])
    config = OptimizerConfig(
        lr=LR,
        optimizer="sgd",
        sgd_momentum=0.0,
        weight_decay=0.0,
        fp16=True,
        loss_scale=SCALE,
        clip_grad=CLIP,
    )
    optimizer = get_megatron_optimizer(model, config, training_group=dist.group.WORLD)
    applied, norms = [], []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            optimizer.scale_loss(model(data(step, micro_batch, rank)) / MICRO_BATCHES).backward()
        if step == BAD_STEP and rank == 1:
            model.module.head.weight.main_grad[0, 2] = torch.nan
        model.allreduce_gradients()
        report = optimizer.step()
        applied.append(report.is_applied)
        norms.append(report.grad_norm)
    return {"started": started, "applied": applied, "norms": norms, "ended": numbers(model.parameters())}


def experts(rank):
    """An expert's weights and gradients stay on its rank, the gradients divided by the number of ranks."""
    model = LocalDDP(Model(seed=rank, has_experts=True))
    for parameter in model.parameters():
        parameter.main_grad.fill_(float(rank + 1))
    model.allreduce_gradients()
    own = Model(seed=rank).body
    return {
        "is_own": torch.equal(model.module.body.weight, own.weight),
        "head": numbers([model.module.head.weight]),
        "expert_gradient": model.module.body.weight.main_grad.unique().tolist(),
        "gradient": model.module.head.weight.main_grad.unique().tolist(),
    }


def alone(rank):
    """A group of one: nothing is sent."""
    groups = [dist.new_group([each]) for each in range(2)]
    model = LocalDDP(Model(seed=rank), data_parallel_group=groups[rank])
    model.module.head.bias.main_grad.fill_(float(rank))
    model.allreduce_gradients()
    return [
        torch.equal(model.module.head.weight, Model(seed=rank).head.weight),
        model.module.head.bias.main_grad.item(),
    ]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = {"train": train(rank), "experts": experts(rank), "alone": alone(rank)}
    (Path(os.environ["RESULTS"]) / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
