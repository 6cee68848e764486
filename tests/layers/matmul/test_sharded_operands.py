"""Which operands are shards; the exchange is in tests/distributed."""

from types import SimpleNamespace

import pytest

from megalowbit.layers.matmul.sharded_operands import ShardedOperands

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
