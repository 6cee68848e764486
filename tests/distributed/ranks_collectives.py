"""Two ranks issue collectives that gloo completes and NCCL would not: they differ on purpose."""

import pickle

import torch
import torch.distributed as dist
from tiny_training import rank_and_size, report

from megalowbit.distributed import collectives
from megalowbit.engine.process_start import start_process_group
from megalowbit.supervision import flight_recorder

start_process_group()
rank, world_size = rank_and_size()
groups = [collectives.new_group(range(world_size)) for _ in range(2)]

# each group's calls agree, but no rank can wait for its first call before it issues its second
ordered = groups if rank == 0 else groups[::-1]
for handle in [collectives.all_reduce(torch.ones(2), group=group, async_op=True) for group in ordered]:
    handle.wait()
for _ in range(2):
    if rank == 0:
        collectives.send(torch.ones(3), 1)
    else:
        collectives.recv(torch.empty(3), 0)
# torch's own functions: ours would refuse the memory, and gloo does not notice the operation
dist.all_reduce(torch.ones(2, 3).t())
dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
if rank == 0:
    dist.all_reduce(torch.ones(5), group=dist.new_group([0], use_local_synchronization=True))

entries = pickle.loads(flight_recorder._dump())["entries"]
report([entry["profiling_name"] for entry in entries])
