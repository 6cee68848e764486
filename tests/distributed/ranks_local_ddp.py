"""Two ranks: replicas, averages, overflow, strategies, experts, factors; see test_local_ddp.py."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megalowbit.errors import UserError
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.megatron import OptimizerConfig, get_megatron_optimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings

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
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


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
    optimizer = get_megatron_optimizer(model, config)
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


def freeze(rank):
    """The body trains with momentum and weight decay, is frozen for three steps, and trains again."""
    model = LocalDDP(Model(seed=0).bfloat16())
    optimizer = get_megatron_optimizer(model, OptimizerConfig(lr=LR, bf16=True, weight_decay=0.1))
    body, head, seen = model.module.body, model.module.head, []
    for step in range(STEPS):
        body.requires_grad_(not 3 <= step < 6)
        model(data(step, 0, rank)).backward()
        model.allreduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({"body": numbers(body.parameters()), "head": numbers(head.parameters())})
    return seen


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


def alone(rank, group):
    """A group of one: nothing is sent."""
    model = LocalDDP(Model(seed=rank), data_parallel_group=group)
    model.module.head.bias.main_grad.fill_(float(rank))
    model.allreduce_gradients()
    return [
        torch.equal(model.module.head.weight, Model(seed=rank).head.weight),
        model.module.head.bias.main_grad.item(),
    ]


def half_optimizer(model, scaler, instruments, **options):
    return Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(model.parameters(), lr=LR), grad_scaler=scaler, clip_grad=CLIP,
        instruments=instruments, named_parameters=model.named_parameters(), **options,
    )  # fmt: skip


def strategy(rank, scaler):
    """Gradients of different size on the ranks, no group given: each rank's own largest, and the scales."""
    model = Model(seed=0).half()
    instruments = Instruments.attach(model, scaler)
    wrapped = LocalDDP(model, instruments=instruments)
    optimizer = half_optimizer(model, scaler, instruments)
    own, scales, largest = [], [scaler.scale], []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: largest.append(gradient.abs().max().item()))
    for step in range(STEPS):
        optimizer.scale_loss(wrapped(data(step, 0, rank)) * 3.0**rank).backward()
        wrapped.allreduce_gradients()
        optimizer.step()
        own.append(max(largest) / scales[-1])
        largest.clear()
        scales.append(scaler.scale)
    return {"own": own, "scales": scales, "weights": numbers(model.parameters())}


EXPERT_NORMS = (1.0, 100.0)
EXPERT_CONFIG = {
    "lr": LR, "optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "fp16": True,
    "initial_loss_scale": SCALE, "hysteresis": 1, "clip_grad": CLIP,
}  # fmt: skip


def masters_of(chain):
    dense, experts = chain.chained_optimizers
    return [
        numbers(p.detach() for group in each.param_groups for p in group["params"])
        for each in (dense, experts)
    ]


def expert_step(rank):
    """Experts whose gradients have very different norms; then an infinite one in the expert of rank 1."""
    model, config = LocalDDP(Model(seed=rank, has_experts=True).half()), OptimizerConfig(**EXPERT_CONFIG)
    try:
        get_megatron_optimizer(model, config)
        refusal = None
    except UserError as error:
        refusal = str(error)
    chain = get_megatron_optimizer(model, config, expert_parallel_group=dist.group.WORLD)
    generator, experts = torch.Generator().manual_seed(rank), []
    for name, p in model.module.named_parameters():
        p.main_grad.copy_(torch.randn(p.shape, generator=generator) * SCALE)
        experts += [p.main_grad] if name.startswith("body") else []
    norm = torch.stack([gradient.double().norm() for gradient in experts]).norm()
    for gradient in experts:
        gradient.mul_(2 * EXPERT_NORMS[rank] * SCALE / norm)  # LocalDDP halves it
    model.allreduce_gradients()
    parameters = [[p for group in each.float16_groups for p in group] for each in chain.chained_optimizers]
    gradients = [numbers(p.main_grad / SCALE for p in part) for part in parameters]
    before = masters_of(chain)
    report = chain.step()
    after = masters_of(chain)
    if rank == 1:
        model.module.body.bias.main_grad[0] = torch.inf
    model.allreduce_gradients()
    skipped = chain.step()
    return {
        "refusal": refusal, "gradients": gradients, "before": before, "after": after,
        "norm": report.grad_norm, "skipped": str(skipped), "has_moved": masters_of(chain) != after,
        "scale": chain.loss_scale,
    }  # fmt: skip


def rank_without_expert(rank):
    """Rank 1 has no expert, and takes part in the collectives about rank 0's."""
    model = Model(seed=rank, has_experts=True).half()
    if rank == 1:
        model.body = torch.nn.Identity()
    wrapped = LocalDDP(model)
    config = OptimizerConfig(**EXPERT_CONFIG)
    chain = get_megatron_optimizer(wrapped, config, expert_parallel_group=dist.group.WORLD)
    reports = []
    for step in range(3):
        chain.scale_loss(wrapped(data(step, 0, rank))).backward()
        if step == 1 and rank == 0:
            model.body.weight.main_grad[2, 2] = -torch.inf
        wrapped.allreduce_gradients()
        reports.append(str(chain.step()))
    return {"reports": reports, "dense": numbers(model.head.parameters())}


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        hidden = x.half()
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (self.head(hidden).float().flatten() - x.sum(1)).square().mean()


def layer_scaled(rank, *, has_factors, group, is_given=True):
    """With a `group` of one rank, no LocalDDP: what all ranks see comes as micro-batches."""
    model, scaler = Blocks().half(), ConstantGradScaler(2.0**8)
    settings = LayerScalingSettings(enabled=has_factors)
    instruments = Instruments.attach(model, scaler, layer_scaling=settings)
    wrapped = model
    if group is None:
        wrapped = LocalDDP(model, instruments=instruments if is_given else None)
    optimizer = half_optimizer(model, scaler, instruments, training_group=group)
    norms, factors = [], []
    for step in range(STEPS):
        for each in (rank,) if group is None else range(2):
            loss = wrapped(data(step, 0, each)) / (1 if group is None else 2)
            optimizer.scale_loss(loss).backward()
        if group is None:
            wrapped.allreduce_gradients()
        try:
            norms.append(optimizer.step().grad_norm)
        except UserError as error:
            return str(error)
        if has_factors:
            factors.append(list(optimizer.layer_scaling.factors.values()))
    return {
        "norms": norms,
        "factors": factors,
        "weights": numbers(map(optimizer.master_of, model.parameters())),
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own_group = [dist.new_group([each]) for each in range(2)][rank]
    seen = {
        "train": train(rank),
        "freeze": freeze(rank),
        "experts": experts(rank),
        "alone": alone(rank, own_group),
        "max_value": strategy(rank, MaxValueGradScaler(16.0, ema_decay=0.0)),
        "controller": strategy(rank, ControllerGradScaler(16.0)),
        "expert_step": expert_step(rank),
        "rank_without_expert": rank_without_expert(rank),
        "factors": layer_scaled(rank, has_factors=True, group=None),
        "no factors": layer_scaled(rank, has_factors=False, group=None),
        "factors alone": layer_scaled(rank, has_factors=True, group=own_group),
        "untold": layer_scaled(rank, has_factors=True, group=None, is_given=False),
    }
    (Path(os.environ["RESULTS"]) / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
