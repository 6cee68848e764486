"""Tensors in files of `torch.save`, each read from its place in the file when it is needed.

Such a file is a zip archive with a pickle, and an uncompressed record for each storage. `torch.load` can map
the file, but pages that were read then count as memory of the process until its last tensor is gone. Here the
mapping only tells which record each storage is. It is released, and bytes are read from the file.

torch does not compare the checksums of the archive, and with a mapping also not the sizes of its records: a
wrong byte in the pickle or in a header gives other weights. Here the checksums of the pickle and of other
small records are compared when a file is opened, that of a storage when it is first read. A checksum of 0 was
not computed (`torch.serialization.set_crc32_options`).

Not covered: files of the format before torch 1.6, which have no checksums and are read as a whole; files
written on big-endian machines.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megalowbit.errors import UserError

STORAGES = "data/"  # what the names of storages' records begin with, after the name of the archive
BYTE_ORDER = "byteorder"
LOCAL_HEADER = struct.Struct("<4s22x2H")  # its mark, and the lengths of a name and of extra fields behind it
LOCAL_MARK = b"PK\x03\x04"
CHUNK = 2**20  # bytes that a checksum reads at once
REMEDY = "use another checkpoint"


class Source(Protocol):
    """The bytes of a storage."""

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a flat uint8 tensor from byte `start`."""


@dataclass(eq=False)
class Record:
    """A storage's record in a file.

    Attributes:
        path: the file.
        start: its first byte there.
        nbytes: bytes that it has.
        checksum: CRC-32 of these; 0 if it is not known.
    """

    path: Path
    start: int
    nbytes: int
    checksum: int
    _is_checked: bool = False

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a flat uint8 tensor from byte `start` of the record.

        Raises:
            UserError: the record has another checksum, or the file has become shorter.
        """
        if not self._is_checked:
            self._check()
        view = target.numpy().data
        if start + len(view) > self.nbytes:
            raise UserError(f"{self.path} holds a tensor that is larger than its storage: {REMEDY}")
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + start)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise UserError(f"{self.path} became shorter while it was read: start again")
                view = view[count:]

    def _check(self) -> None:
        found, left = 0, self.nbytes if self.checksum else 0
        with self.path.open("rb") as file:
            file.seek(self.start)
            while left and (chunk := file.read(min(left, CHUNK))):
                found = zlib.crc32(chunk, found)
                left -= len(chunk)
        if found != self.checksum or left:
            raise UserError(f"{self.path} is damaged: the checksum of a tensor is wrong; {REMEDY}")
        self._is_checked = True


@dataclass(eq=False)
class Memory:
    """A storage that was read as a whole."""

    storage: torch.UntypedStorage

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a flat uint8 tensor from byte `start`."""
        whole = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        target.copy_(whole[start : start + target.numel()])


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor in a file.

    Attributes:
        source: its storage.
        dtype: its dtype.
        shape: its shape.
        stride: steps between elements of each axis, in elements.
        offset: of its first element in the storage, in elements.
    """

    source: Source
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, source: Source | None = None) -> FileTensor:
        """A loaded tensor, whose storage `source` reads; None: it stays in memory."""
        source = Memory(tensor.untyped_storage()) if source is None else source
        offset = int(tensor.storage_offset())
        return cls(source, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for two tensors that are the same memory."""
        return id(self.source), self.dtype, self.shape, self.stride, self.offset

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meta(self) -> torch.Tensor:
        """A contiguous tensor of the same shape and dtype without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """The tensor, in memory that nothing else refers to.

        Raises:
            UserError: the file is damaged, or changed since it was opened.
        """
        if self.is_contiguous:
            value = torch.empty(self.shape, dtype=self.dtype)
            self.read_into(value.view(-1))
            return value
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(1 + reach, dtype=self.dtype)
        self.cut(0, flat.shape).read_into(flat)
        return flat.as_strided(self.shape, self.stride)

    def read_into(self, target: torch.Tensor) -> None:
        """Copy a contiguous tensor's elements into a flat tensor of the same dtype and number of elements."""
        if target.numel():
            self.source.read_into(target.view(torch.uint8), self.offset * self.dtype.itemsize)

    def cut(self, start: int, shape: Sequence[int]) -> FileTensor:
        """A contiguous tensor that begins `start` elements behind the first one in memory."""
        return dataclasses.replace(
            self, shape=tuple(shape), stride=_contiguous_stride(shape), offset=self.offset + start
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other, without gaps."""
        sizes = zip(self.shape, self.stride, _contiguous_stride(self.shape), strict=True)
        return not self.numel() or all(size == 1 or step == other for size, step, other in sizes)


def with_file_tensors(content: Any, sources: Mapping[int, Source]) -> Any:
    """A loaded content in which `FileTensor` takes the place of tensors in dictionaries, lists and tuples.

    Sparse, quantised and meta tensors, and those in other objects, stay.

    Args:
        content: as `torch.load` returns it; its dictionaries and lists are changed.
        sources: the storages by their first address.
    """
    done: dict[int, Any] = {}
    sources = dict(sources)

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _file_tensor(value, sources)
        if id(value) in done or not isinstance(value, (dict, list, tuple)):
            return done.get(id(value), value)
        done[id(value)] = value
        if isinstance(value, tuple):
            parts = [replaced(each) for each in value]
            is_same = all(new is old for new, old in zip(parts, value, strict=True))
            done[id(value)] = value if is_same else tuple(parts)
            return done[id(value)]
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            value[key] = replaced(value[key])
        return value

    return replaced(content)


def _file_tensor(value: torch.Tensor, sources: dict[int, Source]) -> FileTensor | torch.Tensor:
    is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not is_plain or value.is_neg() or value.is_conj():
        return value
    storage = value.untyped_storage()
    source = sources.setdefault(storage.data_ptr(), Memory(storage))  # of no record: read as a whole
    return FileTensor.of(value, source)


class Archive:
    """The records of a file of `torch.save`.

    Args:
        path: the file.

    Raises:
        UserError: the archive is damaged, or was not written by `torch.save` on such a machine.
        OSError, zipfile.BadZipFile: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: list[Record] = []
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            infos = archive.infolist()
            names = [info.filename.partition("/")[2] for info in infos]
            if len({*names}) < len(names):
                raise self._damaged("a name occurs twice in it")
            for name, info in zip(names, infos, strict=True):
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise self._damaged(f"its record {name} is compressed, which torch does not write")
                record = self._record(file, info)
                if name.startswith(STORAGES):
                    self._records.append(record)
                    continue
                content = torch.empty(record.nbytes, dtype=torch.uint8)
                record.read_into(content, 0)
                if name == BYTE_ORDER and bytes(content.numpy()) != sys.byteorder.encode():
                    raise UserError(f"{path} was not written on a {sys.byteorder}-endian machine: convert it")
        self._records.sort(key=lambda record: record.start)

    def sources(self, storages: Sequence[torch.UntypedStorage]) -> dict[int, Source]:
        """The record of each storage, by the storage's first address.

        Args:
            storages: all storages of the file; they lie in one mapping of it.

        Raises:
            UserError: they do not agree in number, sizes and places.
        """
        records = [record for record in self._records if record.nbytes]
        found = sorted({(each.data_ptr(), each.nbytes()) for each in storages if each.nbytes()})
        bases = {
            (address - record.start, nbytes - record.nbytes)
            for (address, nbytes), record in zip(found, records, strict=False)
        }
        if len(found) != len(records) or len(bases) > 1 or any(difference for _, difference in bases):
            raise self._damaged("its tensors are not those that it describes")
        return {address: record for (address, _), record in zip(found, records, strict=True)}

    def _record(self, file: Any, info: zipfile.ZipInfo) -> Record:
        """A record; its content begins behind its local header."""
        file.seek(info.header_offset)
        header = file.read(LOCAL_HEADER.size)
        if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_MARK):
            raise self._damaged("a record's header is wrong")
        _, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if start + info.file_size > self.path.stat().st_size:
            raise self._damaged("it ends too early")
        return Record(self.path, start, info.file_size, info.CRC)

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self.path} is damaged: {reason}; {REMEDY}")


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
