"""Which operands are shards; the exchange is in tests/distributed."""

from types import SimpleNamespace

import pytest
import torch

from megalowbit.layers.matmul.sharded_operands import ShardedOperands
from megalowbit.layers.siblings import InputForms

RANK_1 = SimpleNamespace(rank=1, size=2)


@pytest.mark.parametrize(
    ("is_row", "sharded", "whole"),
    [(False, ("weight", "grad_output"), ("input",)), (True, ("weight", "input"), ("grad_output",))],
)
def test_sharded_operands_have_numbers_and_counts_of_their_own(is_row, sharded, whole):
    operands = ShardedOperands(RANK_1, is_row)
    for role in (*sharded, *(["grad_output_for_weight"] if "grad_output" in sharded else [])):
        assert operands.shard_of(role) == 1
        assert operands.is_reported(role)
    for role in whole:
        assert operands.shard_of(role) is None
        assert not operands.is_reported(role)


def test_the_gradient_of_a_sibling_does_not_pass_through_one_without_a_graph():
    """As under `no_grad`, and in the first forward of reentrant checkpointing of a single layer."""
    input, operands = torch.zeros(2, 4, requires_grad=True), ShardedOperands(RANK_1, is_row=False)
    forms = InputForms(input, ("q_proj", "k_proj"), step=0)
    with torch.no_grad():
        assert operands.sum_for_siblings(input, forms).grad_fn is None
    assert operands.sum_for_siblings(input, forms) is None  # so k sums its own
    forms = InputForms(input, ("q_proj", "k_proj"), step=0)
    shared = operands.sum_for_siblings(input, forms)
    assert shared.grad_fn is not None
    assert operands.sum_for_siblings(input, forms) is shared
