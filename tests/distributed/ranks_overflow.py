"""Two ranks: where gradients overflowed, runs that overflow at random, one scale; see test_overflow.py."""

import random

import torch
import torch.distributed as dist
from tiny_training import TinyModel, config, data, make, rank_and_size, report, train_step

from megalowbit.optim.instruments import Instruments
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

INF, NAN = torch.inf, torch.nan
# parameter, value and ranks; then several of one step
SPILLS = {
    "inf": [("body.3.weight", INF, (1,))],
    "nan": [("body.0.bias", NAN, (1,))],
    "first": [("body.0.weight", -INF, (0,))],
    "both": [("body.0.weight", INF, (0, 1))],
    "apart": [("body.0.weight", INF, (0,)), ("body.3.bias", NAN, (1,)), ("body.0.bias", INF, (1,))],
}


def numbers(tensors):
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


def found_of(optimizer):
    """What a report says, as JSON."""
    overflow = optimizer.report.overflow
    return {
        "tuple": list(optimizer.report),
        "text": str(optimizer.report),
        "tensor": overflow and overflow.tensor,
        "rank": overflow and overflow.rank,
        "ranks": overflow and list(overflow.ranks),
        "num_tensors": overflow and overflow.num_tensors,
        "scale": optimizer.loss_scale,
    }


def spoil(model, spill):
    """Write into `main_grad`s of this rank, as if backward had made it so."""
    named = dict(model.named_parameters())
    for name, value, ranks in spill:
        if rank in ranks:
            named[name].main_grad.view(-1)[1 % named[name].numel()] = value


def half_optimizer(model, scaler, **options):
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return Float16OptimizerWithFloat16Params(
        inner, grad_scaler=scaler, named_parameters=model.named_parameters(),
        **{"clip_grad": 1.0, "training_group": WORLD, **options},
    )  # fmt: skip


def engine_overflows():
    engine, optimizer, _, _ = make(TinyModel(), config("fp16", scaler={"type": "constant", "scale": 64.0}))
    seen = {}
    for step, (name, spill) in enumerate(SPILLS.items()):
        train_step(engine, 2 * step)
        before = numbers(engine.module.parameters())
        train_step(engine, 2 * step + 1, lambda engine, spill=spill: spoil(engine.module, spill))
        seen[name] = found_of(optimizer)
        seen[name]["has_moved"] = numbers(engine.module.parameters()) != before
    return seen


def ddp_step(model, optimizer, batch, spill=(), factor=1.0):
    optimizer.scale_loss(model(batch) * factor).backward()
    spoil(model.module, spill)
    model.allreduce_gradients()
    return optimizer.step()


def local_ddp_overflows():
    model = LocalDDP(TinyModel().half())
    optimizer = half_optimizer(model.module, ConstantGradScaler(64.0))
    seen = {}
    for step, (name, spill) in enumerate(SPILLS.items()):
        ddp_step(model, optimizer, data(2 * step, 0, rank, 2))
        before = numbers(model.parameters())
        ddp_step(model, optimizer, data(2 * step + 1, 0, rank, 2), spill)
        seen[name] = {**found_of(optimizer), "has_moved": numbers(model.parameters()) != before}
    return seen


def torch_ddp_overflow():
    """Gradients in half precision, averaged during backward: infinite on both ranks before anyone looks."""
    model = torch.nn.parallel.DistributedDataParallel(TinyModel().half())
    optimizer = half_optimizer(
        model.module, ConstantGradScaler(64.0), params_have_main_grad=False, training_group=None
    )
    bad = model.module.body[0].weight
    seen = []
    for step in range(3):
        before = numbers(model.parameters())
        hook = bad.register_hook(lambda gradient: gradient * INF) if step == 1 and rank == 1 else None
        optimizer.scale_loss(model(data(step, 0, rank, 2))).backward()
        if hook is not None:
            hook.remove()
        optimizer.step()
        seen.append({**found_of(optimizer), "has_moved": numbers(model.parameters()) != before})
    return {"steps": seen, "weights": numbers(model.parameters())}


def without_averaging():
    """Nobody averages and no group is given: overflows of rank 1 alone, then in other places of both."""
    model = TinyModel(seed=rank).half()
    optimizer = half_optimizer(model, ConstantGradScaler(64.0), training_group=None)
    seen = []
    for step, spill in enumerate(([], SPILLS["inf"], SPILLS["apart"], [])):
        before = numbers(model.parameters())
        optimizer.scale_loss(model(data(step, 0, rank, 2))).backward()
        spoil(model, spill)
        optimizer.step()
        seen.append({**found_of(optimizer), "has_moved": numbers(model.parameters()) != before})
    return seen


def overflow_after_averaging(ranks):
    """What `before_step` adds is infinite, on some ranks, long after the gradients were averaged."""
    model = LocalDDP(TinyModel().half())
    optimizer = half_optimizer(
        model.module, ConstantGradScaler(64.0), training_group=None,
        before_step=lambda _: spoil(model.module, [("body.0.weight", INF, ranks)]),
    )  # fmt: skip
    ddp_step(model, optimizer, data(0, 0, rank, 2))
    return found_of(optimizer)


STEPS, MICRO_BATCHES = 60, 2
BAD = random.Random(5).sample(range(STEPS), STEPS // 10)
# of each bad step: which ranks overflow, and in which micro-batch
BAD_AT = {s: (random.Random(s).choice([(0,), (1,), (0, 1)]), random.Random(s).randrange(2)) for s in BAD}


def scaler_of(kind):
    if kind == "constant":
        return ConstantGradScaler(2.0**12)
    return DynamicGradScaler(2.0**12, 2.0**8, growth_interval=10, hysteresis=1, max_scale=2.0**12)


def local_ddp_run(kind, without_bad):
    """`STEPS` steps of which a tenth overflow in backward, at a rank and micro-batch drawn at random."""
    model = LocalDDP(TinyModel(seed=3).half())
    optimizer = half_optimizer(model.module, scaler_of(kind), clip_grad=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scales, applied, was_clipped = [], [], False
    for step in range(STEPS):
        if without_bad and step in BAD:
            continue
        for micro_batch in range(MICRO_BATCHES):
            is_bad = step in BAD and rank in BAD_AT[step][0] and micro_batch == BAD_AT[step][1]
            loss = model(data(step, micro_batch, rank, 2)) * (1e6 if is_bad else 1 / MICRO_BATCHES)
            optimizer.scale_loss(loss).backward()
        model.allreduce_gradients()
        found = optimizer.step()
        applied.append(found.is_applied)
        scales.append(found.loss_scale)
        was_clipped = was_clipped or (found.is_applied and found.grad_norm > 0.5)
        if found.is_applied:
            schedule.step()
    masters = numbers(master for group in optimizer.fp32_from_float16_groups for master in group)
    state = numbers(value for state in optimizer.state.values() for value in state.values())
    return {
        "weights": numbers(model.parameters()), "masters": masters, "state": state, "scales": scales,
        "applied": applied, "was_clipped": was_clipped, "lr": optimizer.param_groups[0]["lr"],
    }  # fmt: skip


def engine_run(without_bad):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 100}}
    scaler = {
        "initial_scale": 2.0**12, "min_scale": 2.0**8, "max_scale": 2.0**12, "growth_interval": 10,
        "hysteresis": 1,
    }  # fmt: skip
    settings = config("fp16", steps=MICRO_BATCHES, scaler=scaler, scheduler=scheduler, clipping=0.5)
    engine, *_ = make(TinyModel(seed=3), settings)
    applied = []
    for step in range(STEPS):
        if without_bad and step in BAD:
            continue
        for micro_batch in range(MICRO_BATCHES):
            is_bad = step in BAD and rank in BAD_AT[step][0] and micro_batch == BAD_AT[step][1]
            loss = engine(data(step, micro_batch, rank, 2)) * (1e6 if is_bad else 1.0)
            engine.backward(loss)
            engine.step()
        applied.append(engine.was_step_applied())
    return {"weights": numbers(engine.module.parameters()), "applied": applied, "lr": engine.get_lr()}


class WithExpert(torch.nn.Module):
    """A layer that all ranks hold, and one of this rank alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(4, 4)
        torch.manual_seed(1 + rank)
        self.expert = torch.nn.Linear(4, 1)
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x):
        return self.expert(torch.tanh(self.dense(x))).float().square().mean()


def chained(groups, clip_grad):
    """Dense and expert optimizers whose norms are reduced over groups of their own."""
    model = LocalDDP(WithExpert().half())
    scaler = DynamicGradScaler(64.0, hysteresis=1)
    names = list(model.module.named_parameters())
    chain = ChainedOptimizer(
        [
            Float16OptimizerWithFloat16Params(
                torch.optim.AdamW(part.parameters(), lr=0.05),
                grad_scaler=scaler,
                clip_grad=clip_grad,
                training_group=WORLD,
                model_parallel_group=group,
                named_parameters=names,
            )
            for part, group in zip((model.module.dense, model.module.expert), groups, strict=True)
        ]
    )
    seen = []
    for step, spill in enumerate(([], [("expert.weight", INF, (1,))], [("dense.bias", NAN, (0,))], [])):
        before = numbers(model.parameters())
        ddp_step(model, chain, data(step, 0, rank, 2)[:, :4].half(), spill)
        has_moved = [a != b for a, b in zip(before, numbers(model.parameters()), strict=True)]
        seen.append({**found_of(chain), "has_moved": has_moved})
    return {"steps": seen, "dense": numbers(model.module.dense.parameters())}


def strategies():
    """Different gradients on the ranks, one scale; what each rank's own largest gradient was."""
    seen = {}
    for name, scaler in (
        ("max_value", MaxValueGradScaler(16.0, ema_decay=0.0)),
        ("norm_ratio", NormRatioGradScaler(2.0**4, probe_every=2)),
    ):
        model = TinyModel().half()
        optimizer = half_optimizer(model, scaler, instruments=Instruments.attach(model, scaler))
        own, scales, largest = [], [scaler.scale], []
        for parameter in model.parameters():
            parameter.register_hook(lambda g, found=largest: found.append(g.abs().max().item()))
        for step in range(12):
            # rank 1 alone loses gradients to zero at small scales
            loss = model(data(step, 0, rank, 2)) * (2.0**-26 if rank and name == "norm_ratio" else 3.0**rank)
            optimizer.scale_loss(loss).backward()
            own.append(max(largest) / scaler.scale)
            largest.clear()
            dist.all_reduce(optimizer.grad_buffer.before_reduction())
            optimizer.step()
            scales.append(scaler.scale)
        seen[name] = {"own": own, "scales": scales, "weights": numbers(model.parameters())}
    settings = config("fp16", scaler={"type": "max_value", "initial_scale": 16.0})
    engine, optimizer, _, _ = make(TinyModel(), settings)
    scales = []
    for step in range(6):
        train_step(engine, step)
        scales.append(optimizer.loss_scale)
    seen["engine"] = {"scales": scales}
    return seen


def fp32_of(values, **options):
    """An optimizer with SGD, lr 1, over zeros with these gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(len(value))) for value in values]
    inner = torch.optim.SGD([{"params": parameters}], lr=1.0)
    optimizer = FP32Optimizer(
        inner, model_parallel_group=WORLD, training_group=WORLD, **{"clip_grad": 6.5, **options},
        named_parameters=[(f"p{index}", p) for index, p in enumerate(parameters)],
    )  # fmt: skip
    for parameter, value in zip(parameters, values, strict=True):
        parameter.main_grad.copy_(torch.tensor(value))
    return parameters, optimizer


def sharded(bad=None):
    """A shard of each rank, a replica, and a parameter that another module owns."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 1, 1)]
    parameters[0].tensor_model_parallel = True
    parameters[2].shared = True
    optimizer = FP32Optimizer(
        torch.optim.SGD(parameters, lr=1.0), clip_grad=6.5, log_num_zeros_in_grad=True,
        model_parallel_group=WORLD, training_group=WORLD,
        named_parameters=zip(("shard", "replica", "shared"), parameters, strict=True),
    )  # fmt: skip
    values = ([3.0, 0.0] if rank == 0 else [4.0, 0.0], [12.0], [100.0])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.main_grad.copy_(torch.tensor(value))
    if bad is not None and rank == 1:
        parameters[bad].main_grad[0] = NAN
    optimizer.step()
    return {**found_of(optimizer), "weights": numbers(parameters)}


def stages(has_tensor_groups):
    """Two pipeline stages: each has parameters of its own, none of which is marked."""
    _, optimizer = fp32_of(
        [[3.0, 0.0, 4.0]] if rank == 0 else [[12.0]], clip_grad=0.0, log_num_zeros_in_grad=True,
        tensor_parallel_group=alone if has_tensor_groups else None,
    )  # fmt: skip
    optimizer.step()
    return found_of(optimizer)["tuple"]


def rank_without_parameters(bad=False):
    """Rank 1 holds no parameter, and takes part in each collective."""
    values = [[3.0, 4.0]] if rank == 0 else []
    parameters, optimizer = fp32_of(values, clip_grad=2.5)
    if bad and rank == 0:
        parameters[0].main_grad[1] = INF
    optimizer.step()
    return {**found_of(optimizer), "weights": numbers(parameters)}


def strategy_without_parameters():
    """As `rank_without_parameters`; the scale follows gradients that rank 1 has none of."""
    parameters = [torch.nn.Parameter(torch.zeros(2).half())] if rank == 0 else []
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([{"params": parameters}], lr=1.0), grad_scaler=MaxValueGradScaler(4.0),
        clip_grad=0.0, model_parallel_group=WORLD, training_group=WORLD,
    )  # fmt: skip
    scales = []
    for _ in range(4):
        for parameter in parameters:
            optimizer.scale_loss(parameter.float().sum()).backward()
        optimizer.step()
        scales.append(optimizer.loss_scale)
    return scales


def averaged_by_hand():
    """A loop that averages the buffer by itself: what is measured is what is there, not what was."""
    model = TinyModel(seed=2).half()
    optimizer = half_optimizer(model, ConstantGradScaler(64.0))
    seen = []
    for factor in (1.0, 1e8 if rank == 1 else 1.0):
        optimizer.scale_loss(model(data(7, 0, rank, 2)) * factor).backward()
        flat = optimizer.grad_buffer.flat
        dist.all_reduce(flat)
        norm = (flat.double() / 64).norm().item()
        optimizer.step()
        seen.append({**found_of(optimizer), "norm": norm})
    return {"steps": seen, "weights": numbers(model.parameters())}


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, _ = rank_and_size()
WORLD = dist.group.WORLD
alone = [dist.new_group([each]) for each in range(2)][rank]
report(
    {
        "local_ddp": local_ddp_overflows(),
        "torch_ddp": torch_ddp_overflow(),
        "runs": {kind: [local_ddp_run(kind, w) for w in (False, True)] for kind in ("constant", "dynamic")},
        "chained": [chained((None, alone), 0.1), chained((None, WORLD), 0.1)],
        "without_averaging": without_averaging(),
        "after_averaging": [overflow_after_averaging(ranks) for ranks in ((0, 1), (1,))],
        "stages": [stages(True), stages(False)],
        "sharded": [sharded(), sharded(bad=0), sharded(bad=2)],
        "rank_without_parameters": [rank_without_parameters(), rank_without_parameters(bad=True)],
        "strategy_without_parameters": strategy_without_parameters(),
        "by_hand": averaged_by_hand(),
        "strategies": strategies(),
        "engine": engine_overflows(),
        "engine_runs": [engine_run(without_bad) for without_bad in (False, True)],
        "bad": sorted(BAD),
    }
)
