"""Two ranks with the same data: which random numbers each rounds with; see test_streams.py."""

import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import megalowbit as mlb
from megalowbit.engine.process_start import stop_process_group

WIDTH, BATCH, SEED, LR = 32, 16, 7, 2.0**-4
EQUAL = {"seed": SEED, "rank": 0}


def plain_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH), torch.nn.Tanh()
    )


def model(**arguments):
    made = plain_model()
    mlb.convert(made, **({"seed": SEED} | arguments))
    return made


def alone():
    """BitLinear layers that nobody has converted, on ranks that are seeded alike."""
    torch.manual_seed(3)
    return torch.nn.Sequential(mlb.BitLinear(WIDTH, 64), torch.nn.Tanh(), mlb.BitLinear(64, WIDTH))


def loss_of(net):
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return net(x).square().mean()


def gradients(net):
    """Of one micro-batch, in a single process."""
    loss_of(net).backward()
    return numbers(p.grad for p in net.parameters())


def numbers(tensors):
    return [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]


def by_local_ddp(net):
    wrapped = mlb.LocalDDP(net)
    config = mlb.OptimizerConfig(lr=LR, optimizer="sgd", clip_grad=0.0, weight_decay=0.0)
    optimizer = mlb.get_megatron_optimizer(wrapped, config)
    optimizer.scale_loss(loss_of(wrapped)).backward()
    wrapped.allreduce_gradients()
    return numbers(p.main_grad for p in net.parameters())


def by_ddp(net):
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    loss_of(wrapped).backward()
    return numbers(p.grad for p in net.parameters())


def by_stock_deepspeed(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": BATCH}
    )
    engine.backward(loss_of(engine))
    return numbers(p.grad for p in net.parameters())


def by_initialize(net):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "megalowbit": {"precision": "fp32"},
    }
    engine, *_ = mlb.initialize(model=net, config=config)
    engine.backward(loss_of(engine))
    return numbers(p.main_grad for p in net.parameters())


def line_of(action):
    """The line that an action is refused with, or None."""
    try:
        action()
    except mlb.UserError as error:
        return str(error)
    return None


def refusals(rank, own_group):
    wrong, right = model(**EQUAL), model(seed=SEED, rank=rank)
    ddp_of_wrong, ddp_of_right = map(torch.nn.parallel.DistributedDataParallel, (wrong, right))
    settings = {"candidates": ["fp8", "bf16"]}
    sharded = model(**EQUAL)
    sharded[0].weight.tensor_model_parallel = True
    return {
        "LocalDDP": line_of(lambda: mlb.LocalDDP(wrong)),
        "LocalDDP right": line_of(lambda: mlb.LocalDDP(right)),
        "LocalDDP of one": line_of(lambda: mlb.LocalDDP(wrong, data_parallel_group=own_group)),
        # only rank 1 can see it, and it must not wait for the other
        "DDP": line_of(lambda: loss_of(ddp_of_wrong) if rank else None),
        "DDP right": line_of(lambda: loss_of(ddp_of_right)),
        "controller": line_of(lambda: mlb.PrecisionController(model(**EQUAL), settings)),
        "controller right": line_of(lambda: mlb.PrecisionController(model(), settings)),
        "controller sharded": line_of(lambda: mlb.PrecisionController(sharded, settings)),
        "initialize": line_of(lambda: by_initialize(model(seed=rank))),
    }


def rank_in(group):
    """Of a stream whose rank was not given, once LocalDDP has a group for it."""
    net = model()
    mlb.LocalDDP(net, data_parallel_group=group)
    return mlb.random_stream(net).rank


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    converted_before, used_before = [model() for _ in range(4)], model()
    before = gradients(used_before)
    used_before.zero_grad()
    dist.init_process_group("gloo")
    own_group = [dist.new_group([each]) for each in range(2)][rank]
    ways = (by_local_ddp, by_ddp, by_stock_deepspeed, by_initialize)
    seen = {
        "before": before,
        "used before": by_ddp(used_before),
        "alone": by_ddp(alone()),
        "explicit": by_initialize(model(**EQUAL)),  # the engine knows better
        "rank in a group of one": rank_in(own_group),
        **refusals(rank, own_group),
        **{way.__name__: way(net) for way, net in zip(ways, converted_before, strict=True)},
        **{f"{way.__name__} after": way(model()) for way in ways},
    }
    (Path(os.environ["RESULTS"]) / f"rank{rank}.json").write_text(json.dumps(seen))
    stop_process_group()


if __name__ == "__main__":
    main()
