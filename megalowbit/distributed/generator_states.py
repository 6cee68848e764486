"""Saves and restores the random generators of a process (torch, CUDA, Python and numpy) as plain data.

A resumed run draws the same dropout masks only if every rank gets back its own generator states. A rank that
did not exist when the checkpoint was written gets a seed derived from step and rank (SHA-256 of
`"step:rank"`), so resuming again gives the same numbers.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megalowbit.distributed.process_grid import ProcessGrid

LENGTH_BYTES = 8


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all generators of this process, including CUDA's if `device` is a CUDA device."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore all generators to a state returned by `random_state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def packed_random_state(device: torch.device) -> bytes:
    """`random_state`, saved by torch and prefixed with its length, as one row for `gather_bytes`."""
    content = io.BytesIO()
    torch.save(random_state(device), content)
    return content.tell().to_bytes(LENGTH_BYTES, "little") + content.getvalue()


def saved_random_state(states: torch.Tensor | Sequence[Mapping[str, Any]], rank: int) -> Mapping[str, Any]:
    """One rank's state from those of all ranks: rows of bytes, or a list in older checkpoints."""
    if not isinstance(states, torch.Tensor):
        return states[rank]
    row = states[rank].numpy().tobytes()
    length = int.from_bytes(row[:LENGTH_BYTES], "little")
    state: Mapping[str, Any] = torch.load(io.BytesIO(row[LENGTH_BYTES:][:length]), weights_only=True)
    return state


def seed_generators(number: int, rank: int) -> int:
    """Seed all generators of this process; returns the seed, a function of `number` and `rank`."""
    seed = int.from_bytes(hashlib.sha256(f"{number}:{rank}".encode()).digest()[:4], "big")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return seed


def has_same_sharding(layout: Mapping[str, Any] | None, grid: ProcessGrid) -> bool:
    """Whether a saved run used the TP and PP sizes of `grid`; `layout` as for `saved_rank_of`."""
    sizes = (1, 1) if layout is None else (layout["tensor_size"], layout["pipeline_size"])
    return sizes == (grid.tensor_size, grid.pipeline_size)


def saved_rank_of(layout: Mapping[str, Any] | None, world_size: int, grid: ProcessGrid) -> int | None:
    """The rank of a saved run of `world_size` ranks at this process's place in the grid; None if none was.

    `layout` is the saved `Layout` as plain data; None: data parallelism only. If no rank had the same place,
    the rank with the same data rank at tensor rank 0 of stage 0 is returned.
    """
    sizes = {key: 1 if layout is None else int(layout[key]) for key in ("tensor_size", "pipeline_size")}
    places = [(grid.data_rank, grid.tensor_rank, grid.stage), (grid.data_rank, 0, 0)]
    found = {}
    for rank in range(world_size):
        saved = ProcessGrid(rank, world_size, **sizes)
        found[saved.data_rank, saved.tensor_rank, saved.stage] = rank
    return next((found[place] for place in places if place in found), None)
