"""One of two ranks, of which the second one has an infinite gradient; see test_shared_flag.py.

Argument: folder for the rendezvous. A collective that only one rank calls fails after ten seconds.
"""

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megalowbit.engine.zero.pieces import GradientPieces, Piece
from megalowbit.optim.optimizers.mixed_precision import FP32Optimizer
from megalowbit.optim.optimizers.options import StepOptions

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{Path(sys.argv[1]) / 'rendezvous'}", rank=rank, world_size=world_size,
    timeout=timedelta(seconds=10),
)  # fmt: skip

weight = torch.nn.Parameter(torch.zeros(3))
optimizer = FP32Optimizer(torch.optim.SGD([weight], lr=1.0), clip_grad=0.0, params_have_main_grad=False)


def step(gradient):
    """Take a step; whether it was applied, the norm, and the weight's first element."""
    weight.grad = torch.tensor([gradient, 0.0, 0.0])
    optimizer.step()
    return [optimizer.report.is_applied, optimizer.report.grad_norm, float(weight[0])]


def flag_of_pieces(gradient):
    """Whether a step at ZeRO stages 1 to 3 would be skipped, and the norm."""
    options = StepOptions(clip_grad=0.0, training_group=dist.group.WORLD)
    pieces = GradientPieces([weight], names=["w"], options=options, copies=None)
    found, _ = pieces.measure([Piece(weight, torch.tensor([gradient]), rank)], is_exact=False).read()
    return [found.found_inf, found.norm]


infinite = math.inf if rank == 1 else 2.0
seen = {
    "pieces": [flag_of_pieces(3.0 + rank), flag_of_pieces(infinite)],
    "steps": [step(2.0), step(infinite)],
}
print(json.dumps(seen))
dist.destroy_process_group()
