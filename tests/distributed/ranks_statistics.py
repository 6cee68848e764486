"""Two ranks: maxima, probes, factors by layer and retries, the same on both; see test_statistics.py."""

import math

import torch
import torch.distributed as dist
from tiny_training import rank_and_size, report

from megalowbit.engine.overflow_retry import StepSnapshot, retry_step
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.statistics.amax import GradientWatch
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.statistics.probe import GradientProbe


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).half()


def data(number, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * number + rank)).half()


def watched(rank, group):
    """Maxima alone and together: clean, an inf on rank 1, a NaN on rank 1, nothing on rank 0."""
    model, seen = model_of(), []
    watch = GradientWatch(model.named_parameters(), group_of=lambda p: int(p is model[2].bias), num_groups=2)
    for number, value in enumerate((None, math.inf, math.nan)):
        model.zero_grad()
        hook = model[2].bias.register_hook(lambda g, v=value: g if v is None or rank == 0 else g * v)
        model(data(number, rank)).float().square().sum().backward()
        hook.remove()
        own = [
            max(p.grad.abs().max().item() for p in list(model.parameters())[:3]),
            model[2].bias.grad.abs().max().item(),
        ]
        seen.append({"own": own, "all": watch.take(group).tolist()})
    if rank == 1:
        model.zero_grad()
        model(data(9, rank)).float().square().sum().backward()
    return [*seen, {"all": watch.take(group).tolist()}]


def watched_by_one(rank, group):
    """Maxima where rank 0 has nothing that is trained."""
    model = model_of().requires_grad_(rank == 1)
    watch = GradientWatch(model.named_parameters(), num_groups=2)
    if rank == 1:
        model(data(3, rank)).float().square().sum().backward()
    own = max((p.grad.abs().max().item() for p in model.parameters() if p.grad is not None), default=0.0)
    return {"own": own, "all": watch.take(group).tolist()}


def probed(rank, group):
    """Figures of this rank alone and of both, of the same micro-batch."""
    model, seen = model_of(), []
    probe = GradientProbe(model)
    for each in (None, group):
        probe.is_armed = True
        model(data(1, rank)).float().square().sum().backward()
        seen.append(probe.take(each).tolist())
        probe.is_armed = False
    return seen


def scaled(rank, group):
    """Factors that follow the larger gradients of the two ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).half()
    scaling = LayerScaling(model, ["0", "1"])
    watch = GradientWatch(model.named_parameters(), group_of=scaling.group_of, num_groups=scaling.num_groups)
    for number in range(12):
        model.zero_grad()
        ((model(data(number, rank)).float() * (1 + 63 * rank)).sum() / 64).backward()
        amaxes = watch.take(group).tolist()
        scaling.update(amaxes, not all(map(math.isfinite, amaxes)), 1.0)
    return scaling.state_dict()


def retried(rank, group):
    """One rank's gradients overflow at the first scales; both ranks try again together."""
    model = model_of()
    scaler = DynamicGradScaler(initial_scale=2.0**8)
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=scaler, params_have_main_grad=True,
        model_parallel_group=group, clip_grad=0.0,
    )  # fmt: skip
    retries = []
    for number in range(3):
        batch = data(number, rank)

        def run(batch=batch):
            loss = model(batch).float().square().mean() + torch.rand(()) * 0
            optimizer.scale_loss(loss).backward()
            if rank == 1 and scaler.scale > 2.0**6:
                model[0].weight.main_grad[0, 0] = torch.inf
            flat = optimizer.grad_buffer.flat
            dist.all_reduce(flat, group=group)
            was_applied = optimizer.step()[0]
            return type("Report", (), {"is_applied": was_applied})()

        report_, attempts = retry_step(run, StepSnapshot(model), scaler, 4)
        retries.append([report_.is_applied, attempts, scaler.scale])
    numbers = torch.rand(()).item() if rank == 0 else None
    return {"retries": retries, "weights": [p.double().tolist() for p in model.parameters()], "next": numbers}


dist.init_process_group("gloo")
rank, _ = rank_and_size()
world = dist.group.WORLD
torch.manual_seed(11)
report({"watched": watched(rank, world), "watched_by_one": watched_by_one(rank, world),
        "probed": probed(rank, world), "scaled": scaled(rank, world),
        "retried": retried(rank, world)})  # fmt: skip
