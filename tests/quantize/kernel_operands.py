"""What the CPU kernels are tried on, and how what comes out is compared."""

import math
import os
import shutil

import torch

from megalowbit import c_library

# not whether the kernels can be had: where there is a compiler, broken ones must fail
HAS_COMPILER = bool(os.environ.get("CC")) or any(map(shutil.which, ("cc", "gcc", "clang")))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_numbers(a, b):
    """Equal bits, but for the payloads of NaN."""
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(
        bits(torch.where(is_nan, 0, a)), bits(torch.where(is_nan, 0, b))
    )


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special(name, rows, cols):
    """Numbers where kernels go wrong; at least 5 rows of 78."""
    x = gaussian(rows, cols, seed=2)
    if name == "subnormal":
        return x * 1e-41
    if name == "tiny":
        return x * 2e-37
    if name == "huge":
        return (x * 1e38).clamp(-3.4e38, 3.4e38)
    if name == "many magnitudes":
        return x * torch.logspace(-44, 37, cols)
    if name == "zeros":
        return x * 0
    if name == "outliers":
        x[::3, 5], x[1::3, 70], x[2::3, -10] = 30.0, -200.0, 18.0
        return x
    assert name == "spoiled"
    x[0, 3], x[1, 40], x[2, 77:] = math.inf, math.nan, -math.inf
    x[3, :32] = -0.0
    x[4, 1::2] = 1e-30
    return x


def spoil(monkeypatch, folder, kernels, name, right, wrong):
    """Let a module of C kernels be built from sources of which one is changed, in a cache of its own."""
    for each in (kernels.LIBRARY.source.name, *kernels.LIBRARY.headers):
        text = kernels.LIBRARY.source.with_name(each).read_text()
        assert each != name or right in text
        (folder / each).write_text(text.replace(right, wrong) if each == name else text)
    monkeypatch.setattr(kernels.LIBRARY, "source", folder / kernels.LIBRARY.source.name)
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(folder / "cache"))
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", (("-O0", "-fopenmp"),))  # quick to build
