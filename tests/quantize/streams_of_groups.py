"""A random stream that was given no rank, before, in and after a process group."""

import copy

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalowbit.quantize.random_stream import RandomStream

stream, own = RandomStream(1), RandomStream(1, rank=1)
alone = stream.key("a", "input")
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
try:
    assert stream.rank == 3
    assert stream.key("a", "input") == RandomStream(1, rank=3).key("a", "input") != alone
    assert stream.key("a", "weight", is_shared=True) == own.key("a", "weight", is_shared=True)
    assert own.rank == 1
    assert copy.deepcopy(stream).key("a", "input") == stream.key("a", "input")
finally:
    dist.destroy_process_group()
assert stream.rank == 0
assert stream.key("a", "input") == alone
print("done")
