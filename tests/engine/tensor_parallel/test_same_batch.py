"""Digests in a group of one; tests/distributed/test_tensor_parallel.py tests ranks that differ."""

import pytest
import torch

from megalowbit.engine.tensor_parallel.same_batch import _digest

A = torch.arange(6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (A, A + 1),
        (A, A.float()),
        (A, A.view(2, 3)),
        ({"a": A}, {"b": A}),
        ([A, A], [A]),
        ((A, None), (A, 1)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
        ("a", "b"),
    ],
)
def test_different_values_have_different_digests(one, other):
    assert _digest(one) != _digest(other)


def test_equal_values_have_one_digest_whatever_their_memory():
    strided = torch.arange(12).view(3, 4).t()
    assert _digest({"a": [strided]}) == _digest({"a": [strided.contiguous().requires_grad_(False)]})
    assert _digest(object()) == _digest(object())
