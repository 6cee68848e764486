"""Cutting and joining; layers over ranks are in tests/distributed/test_tensor_parallel.py."""

import copy
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.process_start import start_process_group
from megalowbit.engine.tensor_parallel.shard_model import sum_head_norms
from megalowbit.errors import UserError
from megalowbit.layers.tensor_parallel.linear import Sharding, parallel_linear


@pytest.fixture
def group():
    start_process_group()
    return TensorGroup(dist.group.WORLD)


@pytest.mark.parametrize(("dim", "parts"), [(0, (12,)), (1, (8,)), (0, (4, 4, 4)), (0, (8, 2, 2))])
@pytest.mark.parametrize("size", [1, 2])
def test_shards_join_to_what_was_cut(dim, parts, size):
    whole = torch.arange(96.0).view(12, 8)
    sharding = Sharding(dim, parts)
    shards = [sharding.shard(whole, rank, size) for rank in range(size)]
    assert torch.equal(sharding.join(shards), whole)
    assert {sharding.full_shape(shard.shape) for shard in shards} == {(12, 8)}
    assert shards[0].data_ptr() != whole.data_ptr()


def test_every_rank_gets_its_share_of_each_part():
    whole = torch.arange(12.0)
    assert Sharding(0, (4, 4, 4)).shard(whole, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


def test_uneven_parts_and_other_tensors_are_refused():
    with pytest.raises(UserError, match="a part of 3 is not divisible by 2"):
        Sharding(0, (3,)).shard(torch.zeros(3), 0, 2)
    with pytest.raises(UserError, match="cannot be divided into parts"):
        Sharding(0, (4,)).shard(torch.zeros(3), 0, 2)


@pytest.mark.parametrize("is_row", [False, True])
def test_a_layer_of_one_rank_is_a_linear_layer(group, is_row):
    plain = torch.nn.Linear(6, 4)
    x = torch.randn(3, 6, requires_grad=True)
    expected = plain(x)
    expected.sum().backward()
    wanted = plain.weight.grad.clone()
    plain.zero_grad()
    layer = parallel_linear(plain.weight, plain.bias, group, is_row=is_row, parts=(6 if is_row else 4,))
    output = layer(x)
    output.sum().backward()
    assert torch.allclose(output, expected)
    assert torch.equal(layer.weight.grad, wanted)
    assert layer.weight.tensor_model_parallel
    assert layer.weight.sharding == Sharding(int(is_row), (6 if is_row else 4,))
    assert layer.bias.tensor_model_parallel is not is_row
    assert copy.deepcopy(layer).tensor_group is group


def test_a_group_cannot_be_pickled(group):
    with pytest.raises(UserError, match=r"save model\.state_dict"):
        pickle.dumps(group)


class ThreadGroup:
    """Ranks that are threads; a sum waits for all of them."""

    def __init__(self, rank, barrier, shared):
        self.rank, self.size, self.barrier, self.shared = rank, len(shared), barrier, shared

    def sum(self, tensor):
        self.shared[self.rank] = tensor
        self.barrier.wait()
        total = torch.stack([each.detach() for each in self.shared]).sum(0)
        self.barrier.wait()
        return tensor.copy_(total)


class HeadNorm(nn.Module):
    """Multiplies each head of three features by the same weights; a rank has some of the heads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))

    def forward(self, x):
        return (x.unflatten(-1, (-1, 3)) * self.weight).flatten(-2)


def block_of(first, second):
    return nn.Sequential(nn.Sequential(OrderedDict(a=first, q_norm=HeadNorm(), b=nn.Tanh(), c=second)))


def derivatives(model, order):
    """Gradients of x and parameters of a sum; each term is the norm of gradients of the last one.

    These gradients are the same on all ranks, and so is the sum.
    """
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    total = last = model(x).square().sum()
    for _ in range(order - 1):
        found = torch.autograd.grad(last, [x, model[0].q_norm.weight], create_graph=True)
        last = sum(gradient.square().sum() for gradient in found)
        total = total + last
    return torch.autograd.grad(total, [x, *model.parameters()])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_further_derivatives_over_two_ranks_are_those_of_the_full_model(order):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 6).double(), torch.nn.Linear(6, 4).double()
    x, *expected = derivatives(block_of(first, second), order)
    cuts = [Sharding(0, (6,)), Sharding(0, (6,)), None, Sharding(1, (6,)), None]
    barrier, shared = threading.Barrier(2, timeout=60), [None, None]

    def cut(tensor, sharding, rank):
        return tensor.detach() if sharding is None else sharding.shard(tensor.detach(), rank, 2)

    def run(rank):
        group = ThreadGroup(rank, barrier, shared)
        first_parts, second_parts = (
            [
                nn.Parameter(cut(each, sharding, rank))
                for each, sharding in zip(layer.parameters(), of, strict=True)
            ]
            for layer, of in ((first, cuts[:2]), (second, cuts[3:]))
        )
        model = block_of(
            parallel_linear(*first_parts, group, is_row=False, parts=(6,)),
            parallel_linear(*second_parts, group, is_row=True, parts=(6,)),
        )
        sum_head_norms(model, SimpleNamespace(head_norms=("q_norm",)), group)
        return derivatives(model, order)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(run, range(2)))
    for rank, (of_x, *found) in enumerate(ranks):
        torch.testing.assert_close(of_x, x)
        for got, whole, sharding in zip(found, expected, cuts, strict=True):
            torch.testing.assert_close(got, cut(whole, sharding, rank))
