"""`spectra`: matrices with known singular values, and what factors make of them, in float64."""

from types import SimpleNamespace

import pytest
import torch


def orthonormal(rows, cols, generator):
    return torch.linalg.qr(torch.randn(rows, cols, generator=generator, dtype=torch.float64)).Q


def matrix(rows, cols, *, values=None, seed=0, dtype=torch.float64):
    """With singular values 1/i, or the given ones."""
    generator = torch.Generator().manual_seed(seed)
    if values is None:
        values = 1 / torch.arange(1, min(rows, cols) + 1)
    values = torch.as_tensor(values, dtype=torch.float64)
    left, right = (orthonormal(size, len(values), generator) for size in (rows, cols))
    return ((left * values) @ right.t()).to(dtype)


def product(low_rank):
    return (low_rank.left.double() * low_rank.values.double()) @ low_rank.right.double().t()


def captured(x, low_rank):
    """Share of the energy that the best factors of this rank capture."""
    x = x.double()
    best = torch.linalg.svdvals(x)[: len(low_rank.values)].square().sum()
    return ((x.square().sum() - (x - product(low_rank)).square().sum()) / best).item()


@pytest.fixture
def spectra():
    return SimpleNamespace(matrix=matrix, product=product, captured=captured)
