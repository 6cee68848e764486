"""Two ranks: overflow on one of them, clipping, trajectory, stock regression; see test_steps.py."""

import torch
from inspected_gradients import inspected
from tiny_training import TinyModel, config, facts, make, rank_and_size, report, train_step, weights

from megalowbit.distributed.agreement import agree
from megalowbit.errors import TransientError, UserError
from megalowbit.optim.optimizers.mixed_precision import FP32Optimizer


def overflow(precision):
    """Six steps, the third and fourth with inf (then NaN) in a gradient of rank 1 only."""
    scaler = {"initial_scale": 4096.0, "growth_interval": 100} if precision == "fp16" else None
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 50}}
    settings = config(precision, steps=2, scaler=scaler, scheduler=scheduler, clipping=1.0)
    engine, optimizer, _, _ = make(TinyModel(), settings)
    rank, _ = rank_and_size()
    bad = {2: torch.inf, 3: torch.nan}

    def spoiler(value):
        def spoil(engine):
            if rank == 1:
                next(engine.module.parameters()).main_grad[0, 0] = value

        return spoil

    seen = []
    for step in range(6):
        before = weights(engine)
        moments = sum(float(t.double().sum()) for s in optimizer.state.values() for t in s.values())
        train_step(engine, step, spoiler(bad[step]) if step in bad else None)
        after = sum(float(t.double().sum()) for s in optimizer.state.values() for t in s.values())
        seen.append(
            {
                **facts(engine),
                "has_moved": weights(engine) != before,
                "has_state_changed": moments != after,
                "was_applied": engine.was_step_applied(),
            }
        )
    return {"steps": seen, "weights": weights(engine)}


def trajectory(precision):
    settings = config(
        precision, steps=2, clipping=0.5, scaler={"initial_scale": 256.0} if precision == "fp16" else None
    )
    engine, *_ = make(TinyModel(seed=3), settings)
    losses, norms = [], []
    for step in range(12):
        losses.append(train_step(engine, step))
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms}


def stock_regression():
    """SGD, lr 1, gradient 1: stock fp16 at stage 0 does not scale the loss, and steps 16 times too short."""

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))

        def forward(self):
            return self.weight.float().mean() * 4

    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    settings = config("fp16", optimizer=sgd, scaler={"type": "constant", "scale": 16.0})
    engine, *_ = make(One(), settings)
    engine.backward(engine())
    engine.step()
    direct, *_ = make(One(), settings)
    direct.scale(direct()).backward()
    direct.step()
    return [weights(engine), weights(direct)]


def sharded_norm():
    """A gradient split over two ranks beside a replicated one; and a rank that holds nothing."""
    rank, _ = rank_and_size()
    group = torch.distributed.group.WORLD
    shard, replica = torch.tensor([[3.0], [4.0]][rank]), torch.tensor([12.0])
    facts = [inspected([shard, replica], is_counted=[True, rank == 0], group=group)]
    tensors = [torch.tensor([5.0, 0.0])] if rank == 1 else []
    facts.append(inspected(tensors, group=group, count_zeros=True))
    for value in (torch.nan, torch.inf, 3e30):
        gradients = [torch.tensor([value if rank == 1 else 4e30])]
        facts.append(inspected(gradients, group=group))
    return [[f.found_inf, None if f.found_inf else f.norm, f.num_zeros] for f in facts]


def sum_of_norms():
    """As `sharded_norm`, by parameter; then steps of an optimizer, and one on ranks that do not match."""
    rank, _ = rank_and_size()
    group = torch.distributed.group.WORLD
    shard, replica = torch.tensor([[3.0], [4.0]][rank]), torch.tensor([12.0, 0.0])
    by_parameter = {"kind": "sum_of_norms", "is_counted": [True, rank == 0], "group": group}
    seen = []
    for own in (shard, None if rank == 0 else shard, shard * 1e30):
        found = inspected([own, replica], count_zeros=True, **by_parameter)
        seen.append([found.found_inf, found.norm, found.num_zeros])
    bad = torch.tensor([torch.nan if rank == 1 else 1.0])
    found = inspected([bad, replica], **by_parameter)
    seen.append(found.found_inf)

    sharded, whole = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(2))
    sharded.tensor_model_parallel = True
    options = {"clip_grad": 8.5, "gradient_norm": "sum_of_norms", "model_parallel_group": group}
    optimizer = FP32Optimizer(torch.optim.SGD([sharded, whole], lr=1.0), **options)
    sharded.main_grad.copy_(shard)
    whole.main_grad.copy_(replica)
    norm = optimizer.step()[1]
    seen.append([norm, sharded.item(), whole.tolist()])
    odd = [torch.nn.Parameter(torch.zeros(1)) for _ in range(1 + rank)]
    try:
        FP32Optimizer(torch.optim.SGD(odd, lr=1.0), **options)
    except UserError as error:
        seen.append(str(error))
    return seen


def agreement():
    """What each rank gets from a decision of rank 0, and from its errors."""
    rank, _ = rank_and_size()

    def fail(error):
        raise error

    seen = [agree(lambda: f"of rank {rank}")]
    for error in (UserError("mend it"), TransientError("try again"), OSError("disk")):
        try:
            agree(lambda error=error: fail(error))
        except (UserError, OSError, RuntimeError) as caught:
            seen.append([type(caught).__name__, str(caught)])
    return seen


report(
    {
        "fp16": overflow("fp16"),
        "bf16": overflow("bf16"),
        "trajectory": {precision: trajectory(precision) for precision in ("fp32", "bf16", "fp16")},
        "stock": stock_regression(),
        "sharded_norm": sharded_norm(),
        "sum_of_norms": sum_of_norms(),
        "agreement": agreement(),
    }
)
