"""A conversion of weights that reads, changes and writes one tensor at a time.

`Conversion` describes the result before anything is written: the tensors, how each is read, and what else the
folder holds. Therefore a dry run is exact, the free space is checked first, an interrupted conversion
continues (`unfinished`), and a verification can read both sides again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megalowbit.durable_files import FileFacts
from megalowbit.errors import UserError
from megalowbit.hf.folders.shards import SHARD_SIZE, Shard, ShardWriter, TensorSpec, file_size, plan_shards
from megalowbit.hf.folders.stored_weights import same_bits
from megalowbit.hf.folders.unfinished import Draft, resumable_folder


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Weights on their way from one form into another.

    Attributes:
        source: what is read, for messages.
        tensors: the tensors that are written.
        read: gives a tensor, by its name, as it is written.
        read_dtype: the widest dtype that is read; serves to estimate the memory.
        finish: writes all other files into the folder, given the finished weight files.
        key: JSON values on which the tensors depend: the identity of the source, dtype, recipe.
        place: folder of the weight files below the folder that is written.
        stem: what the names of the weight files begin with.
        shard_size: limit of the bytes of tensors in a file.
    """

    source: Path
    tensors: tuple[TensorSpec, ...]
    read: Callable[[str], torch.Tensor]
    read_dtype: torch.dtype
    finish: Callable[[Path, Sequence[FileFacts]], None]
    key: Mapping[str, Any]
    place: str = ""
    stem: str = "model"
    shard_size: int = SHARD_SIZE

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files of weights."""
        return plan_shards(self.tensors, self.shard_size, stem=self.stem)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(map(file_size, self.shards))

    @property
    def peak_memory(self) -> int:
        """An upper bound of the bytes that the largest tensor needs: mapped, joined, cast and transposed."""
        wide = self.read_dtype.itemsize
        sizes = [
            each.nbytes // each.dtype.itemsize * (3 * wide + 2 * each.dtype.itemsize) for each in self.tensors
        ]
        return max(sizes, default=0)

    def run(self, folder: Path, *, is_verified: bool = False) -> None:
        """Write `folder`, completely or not at all; shows a bar if stderr is a terminal.

        Args:
            folder: a new folder.
            is_verified: read all tensors of both sides again and compare their bits before `folder` appears.

        Raises:
            UserError: `folder` exists and is not empty, or cannot be written; the space does not suffice; a
                tensor cannot be read, or differs in the verification.
        """
        key = {"shard_size": self.shard_size, **self.key}
        with resumable_folder(folder, key) as draft:
            place = draft.path / self.place
            place.mkdir(exist_ok=True)
            self._write(folder, draft, place)
            facts = [entry._replace(name=Path(name).name) for name, entry in draft.finished.items()]
            self.finish(draft.path, facts)
            if is_verified:
                self._verify(place)

    def describe(self, folder: Path) -> str:
        """What `run` would write, in lines of text."""
        lines = [f"would write {folder} from {self.source}"]
        for shard in self.shards:
            dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in shard.tensors}))
            lines.append(
                f"  {Path(self.place) / shard.file}: {file_size(shard):,} bytes, {len(shard.tensors):,} "
                f"tensors, {dtypes}"
            )
        lines.append(f"weights: {self.nbytes:,} bytes; free: {_free_space(folder):,} bytes")
        lines.append(f"memory: at most {self.peak_memory:,} bytes more than the program itself")
        return "\n".join(lines)

    def _write(self, folder: Path, draft: Draft, place: Path) -> None:
        finished = [shard for shard in self.shards if str(Path(self.place) / shard.file) in draft.finished]
        left = self.nbytes - sum(map(file_size, finished))
        if (free := _free_space(folder)) < left:
            raise UserError(
                f"{folder} needs {left:,} bytes, and {free:,} are free: free space or name another folder"
            )
        names = [shard.file for shard in finished]
        writer = ShardWriter(place, self.tensors, shard_size=self.shard_size, stem=self.stem, finished=names)
        with writer, _progress(f"writing {folder}", self.nbytes, self.nbytes - left) as advance:
            for spec in writer.pending():
                file = writer.write(spec.name, self.read(spec.name))
                if file is not None:
                    draft.note(str(Path(self.place) / file))
                advance(spec.nbytes)

    def _verify(self, place: Path) -> None:
        with _progress("verifying", self.nbytes) as advance:
            for shard in self.shards:
                _drop_from_cache(place / shard.file)
                for spec in shard.tensors:
                    try:
                        with safe_open(place / shard.file, "pt") as file:
                            written = file.get_tensor(spec.name)
                    except SafetensorError as error:
                        raise UserError(
                            f"{shard.file} cannot be read again ({error}): check the disk"
                        ) from error
                    if not same_bits(written, self.read(spec.name)):
                        raise UserError(
                            f"{spec.name} in {shard.file} is not that of {self.source}: the source changed, "
                            "or memory or disk failed: convert again"
                        )
                    advance(spec.nbytes)


def identity_of(paths: Sequence[Path], folder: Path) -> list[list[Any]]:
    """Name, size, times and number of files: equal as long as nobody has written to them.

    The time of the last change of state (`ctime`) cannot be set by programs.
    """
    found = []
    for path in sorted(paths):
        facts = path.stat()
        name = path.relative_to(folder).as_posix()
        found.append([name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino])
    return found


def _free_space(folder: Path) -> int:
    """Bytes that this user may still write beside `folder`."""
    place = next(each for each in folder.absolute().parents if each.is_dir())
    return shutil.disk_usage(place).free


def _drop_from_cache(path: Path) -> None:
    """Have the next read come from the disk, where the system supports it."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _progress(text: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; yields a function that takes the bytes of each step."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total, completed=done)
        yield lambda nbytes: bar.advance(task, nbytes)
