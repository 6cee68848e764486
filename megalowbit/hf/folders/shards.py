"""Writes named tensors one after the other into safetensors files of limited size, and their index.

A safetensors file is an 8-byte length, a JSON header with the name, dtype, shape and place of every tensor,
and their bytes without gaps. Names, dtypes and shapes of all tensors are known before the first is written,
so each file starts with its complete header, and tensors go to their places in any order. Memory holds one
tensor at a time, and a second one only to make it contiguous.

Tensors are assigned to files in their order, and files are named, as transformers does it:
`model.safetensors`, or `model-00001-of-00003.safetensors` and `model.safetensors.index.json`. In a file,
tensors of wide elements come first, because readers need them aligned.

Not covered: tensors that share memory. Each name is written in full.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megalowbit.durable_files import atomic_file, sync
from megalowbit.hf.folders.weight_files import DTYPES, INDEX, SAFETENSORS

SHARD_SIZE = 5 * 10**9  # bytes
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes; of the first tensor in a file


class TensorSpec(NamedTuple):
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shard(NamedTuple):
    """One file of tensors."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(each.nbytes for each in self.tensors)


def plan_shards(
    tensors: Iterable[TensorSpec], shard_size: int = SHARD_SIZE, *, stem: str = "model"
) -> tuple[Shard, ...]:
    """Assign tensors to files of at most `shard_size` bytes; a larger tensor gets a file for itself."""
    groups: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    size = 0
    for each in tensors:
        if each.nbytes > shard_size:
            groups.append([each])
            continue
        if size + each.nbytes > shard_size:
            groups.append(current)
            current, size = [], 0
        current.append(each)
        size += each.nbytes
    if current or not groups:
        groups.append(current)
    if len(groups) == 1:
        return (Shard(stem + SAFETENSORS, tuple(groups[0])),)
    names = (f"{stem}-{number:05d}-of-{len(groups):05d}{SAFETENSORS}" for number in range(1, len(groups) + 1))
    return tuple(Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True))


class ShardWriter:
    """Writes the files of one set of weights into a folder, usually the draft of a `new_folder`.

    Use it as a context manager: when the block ends without an error, all tensors must have been written, and
    the index is written if there are several files.

    Args:
        folder: an existing folder.
        tensors: all tensors that will be written.
        shard_size: limit of the bytes of tensors in a file.
        stem: what the names of the files begin with.
        finished: names of files that are complete already; their tensors are not written.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Iterable[TensorSpec],
        *,
        shard_size: int = SHARD_SIZE,
        stem: str = "model",
        finished: Collection[str] = (),
    ) -> None:
        self.folder, self._stem = folder, stem
        self.shards = plan_shards(tensors, shard_size, stem=stem)
        self._places: dict[str, tuple[str, TensorSpec, int]] = {}  # file and offset in it
        self._left: dict[str, set[str]] = {}  # names that each started or future file lacks
        self._headers: dict[str, bytes] = {}
        for shard in self.shards:
            header, places = _header(shard.tensors)
            for each in shard.tensors:
                if each.name in self._places:
                    raise ValueError(f"tensor {each.name} is planned twice")
                self._places[each.name] = (shard.file, each, len(header) + places[each.name])
            if shard.file not in finished:
                self._headers[shard.file] = header
                self._left[shard.file] = {each.name for each in shard.tensors}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def pending(self) -> list[TensorSpec]:
        """The tensors that have not been written, file by file."""
        return [
            each
            for shard in self.shards
            for each in shard.tensors
            if each.name in self._left.get(shard.file, ())
        ]

    def write(self, name: str, tensor: torch.Tensor) -> str | None:
        """Write one tensor; returns the name of its file if this completes it, which is then on the disk.

        Raises:
            ValueError: the tensor is not one of the planned, or was written before.
            OSError: the file cannot be written.
        """
        if name not in self._places or name not in self._left.get(self._places[name][0], ()):
            raise ValueError(f"tensor {name} is not planned, or was written before")
        file, spec, start = self._places[name]
        found = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        if found != spec:
            raise ValueError(f"tensor {name} was planned as {spec[1:]}, not {found[1:]}")
        path = self.folder / file
        header = self._headers.pop(file, None)
        if header is not None:
            with path.open("xb") as new:
                new.write(header)
                new.truncate(len(header) + sum(one.nbytes for one in self._shard(file).tensors))
        with path.open("r+b") as opened:
            opened.seek(start)
            # one view of bytes for all dtypes; numpy has no bfloat16
            opened.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._left[file].remove(name)
        if self._left[file]:
            return None
        sync(path)
        return file

    def close(self) -> None:
        """Write the index, if there are several files.

        Raises:
            ValueError: a tensor has not been written.
        """
        if lacking := self.pending():
            raise ValueError(f"{len(lacking)} tensors were not written, the first is {lacking[0].name}")
        for file, header in self._headers.items():  # without tensors
            (self.folder / file).write_bytes(header)
        if len(self.shards) > 1:
            with atomic_file(self.folder / f"{self._stem}{SAFETENSORS}{INDEX}") as index:
                index.write(json.dumps(self._index(), indent=2, sort_keys=True) + "\n")

    def _shard(self, file: str) -> Shard:
        return next(each for each in self.shards if each.file == file)

    def _index(self) -> dict[str, Mapping[str, object]]:
        specs = [spec for _, spec, _ in self._places.values()]
        metadata = {
            "total_parameters": sum(math.prod(each.shape) for each in specs),
            "total_size": sum(each.nbytes for each in specs),
        }
        return {
            "metadata": metadata,
            "weight_map": {name: file for name, (file, _, _) in self._places.items()},
        }


def file_size(shard: Shard) -> int:
    """Bytes of a shard's file."""
    return len(_header(shard.tensors)[0]) + shard.nbytes


def _header(tensors: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and the offset of each tensor behind them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, start = {}, 0
    for each in sorted(tensors, key=lambda one: -one.dtype.itemsize):
        if each.dtype not in CODES:
            raise ValueError(f"safetensors files of this package do not hold {each.dtype}: {each.name}")
        stop = start + each.nbytes
        header[each.name] = {"dtype": CODES[each.dtype], "shape": each.shape, "data_offsets": (start, stop)}
        places[each.name], start = start, stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, places
