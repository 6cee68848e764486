#!/usr/bin/env python
"""FP4 pretraining in a plain PyTorch loop: `python examples/plain_loop.py`.

Trains a tiny fp16 GPT-2 with FP4 projections on the standard library's source files. It also runs on several
processes, with torch's DistributedDataParallel: `torchrun --nproc-per-node 2 examples/plain_loop.py`. That
averages `.grad` in fp16, so `params_have_main_grad` is False then. examples/local_ddp.py keeps fp32 gradients
on several processes too.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb

BATCH, LENGTH, HIDDEN = 8, 64, 64


def read_tokens() -> torch.Tensor:
    """The bytes of the standard library's source files: a vocabulary of 256 tokens."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def positive(text: str) -> int:
    """Parse a number of steps."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def folder(text: str) -> Path:
    """Parse an existing, writable folder."""
    if not os.access(text, os.W_OK) or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a writable folder: create it first")
    return Path(text)


def train(steps: int, out: Path | None, rank: int, world_size: int, device: torch.device) -> None:
    """Train, print, and save what was asked for."""
    torch.manual_seed(rank)  # DistributedDataParallel broadcasts the weights of rank 0
    settings = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=HIDDEN, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(settings).half().to(device)
    mlb.convert(model)
    if world_size > 1:
        model = DistributedDataParallel(model)

    config = mlb.OptimizerConfig(
        lr=3e-3, fp16=True, initial_loss_scale=2.0**19, hysteresis=1, params_have_main_grad=world_size == 1
    )
    optimizer = mlb.get_megatron_optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

    tokens = read_tokens()
    random = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=random)
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts]).long().to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.scale_loss(loss).backward()
        report = optimizer.step()
        if report.is_applied:
            scheduler.step()
        losses.append(loss.detach())
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}  {report}")

    if out is not None:
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
        torch.save({"losses": torch.stack(losses).cpu(), "weights": weights}, out / f"rank{rank}.pt")


def main() -> None:
    """Parse the arguments, start the process group, train, end the group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--out", type=folder, help="save losses and weights as OUT/rank<r>.pt")
    options = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    # a function, so that DistributedDataParallel is freed before the process group ends
    train(options.steps, options.out, rank, world_size, device)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
