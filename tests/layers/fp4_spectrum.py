"""A matrix with singular values 1/i, and NVFP4 by the book in float64; shares no code with the package."""

import torch

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.tensor(
    sorted(
        {m / 8 * 2.0**-6 for m in range(8)}
        | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    ),
    dtype=torch.float64,
)


def matrix(rows: int, cols: int) -> torch.Tensor:
    """float64 (rows, cols) with random singular vectors and singular values 1, 1/2, 1/3, …"""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(size, cols, generator=generator, dtype=torch.float64))[0]
        for size in (rows, cols)
    )
    return left / torch.arange(1, cols + 1, dtype=torch.float64) @ right.t()


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Nearest even in blocks of 16 along rows, E4M3 scales under one of the tensor; float64."""
    blocks = x.double().unflatten(-1, (-1, 16))
    unit = blocks.abs().max() / (6 * 448)
    scale = nearest(blocks.abs().amax(-1, keepdim=True) / 6 / unit, E4M3) * unit
    scaled = torch.where(scale > 0, blocks / scale, 0)
    return (nearest(scaled.abs().clamp(max=6), GRID) * scaled.sign() * scale).flatten(-2)


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The nearest number of a grid; of two the one at an even place."""
    places = (values.unsqueeze(-1) - grid).abs()
    least = places == places.amin(-1, keepdim=True)
    is_even = torch.arange(len(grid)) % 2 == 0
    return grid[(least.int() * 2 - (least & ~is_even).int()).argmax(-1)]
