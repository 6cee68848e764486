"""A DeepSpeed checkpoint engine: atomic files of plain data, and errors that reach every rank.

| | stock DeepSpeed | here |
|---|---|---|
| files | written in place | written atomically, with a SHA-256 |
| content | pickled objects: loss scaler, enumerations, … | plain data; loading executes nothing |
| an error on one rank | the others wait in a barrier | kept until `commit`, which every rank calls |

Of a loss scaler object, `state_dict()` is saved. DeepSpeed's scaler has none and is rejected.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megalowbit.checkpoints.shards import ORIGIN_KEY, check_origin, load_content, origin_of, write_error
from megalowbit.distributed.agreement import gather, raised_on_all_ranks
from megalowbit.distributed.process_group import is_true_anywhere
from megalowbit.durable_files import FileFacts, HashingFile, atomic_file
from megalowbit.errors import TransientError, UserError

LOSS_SCALER = "loss_scaler"  # DeepSpeed's key in the state of a ZeRO optimizer
ATOMS = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)


class AtomicCheckpointEngine(TorchCheckpointEngine):
    """`TorchCheckpointEngine` with atomic files of plain data and errors that reach every rank."""

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self.zipfile_serialization = True
        self._failure: UserError | None = None  # a file could not be written
        self._defect: Exception | None = None  # any other error
        self._facts: dict[str, FileFacts] = {}
        self._read: dict[str, Any] = {}  # path → content that was read ahead
        self.step: int | None = None  # step of the checkpoint being written or read; see `of_step`
        if engine is not None:
            # only rank 0 would copy the script; if its disk is full, the others would wait forever
            engine._copy_recovery_script = _copy_nothing
            # each rank collects its states alone; an error there must not make the others wait
            engine._save_checkpoint = self._keeping_defects(engine._save_checkpoint)
            engine._save_zero_checkpoint = self._keeping_defects(engine._save_zero_checkpoint)

    @contextmanager
    def of_step(self, step: int | None) -> Iterator[None]:
        """Context in which written files record the step, and files that are read must match it."""
        self.step = step
        try:
            yield
        finally:
            self.step = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder; a failure is raised by `commit`."""
        self._keep_failure(path, lambda: os.makedirs(path, exist_ok=exist_ok))  # noqa: PTH103

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; a failure is raised by `commit`."""

        def write() -> None:
            content = plain_data(state_dict)
            # files of pipeline layers hold only weights
            if self.step is not None and type(content) is dict and not Path(path).name.startswith("layer_"):
                content = {**content, ORIGIN_KEY: origin_of(content, Path(path), self.step)}
            with atomic_file(Path(path), "wb") as file:
                hashing = HashingFile(file)
                try:
                    torch.save(content, cast(IO[bytes], hashing))
                except RuntimeError as error:  # on a full disk torch names positions in a zip file
                    raise hashing.failure or error from error
            self._facts[path] = hashing.facts(path)

        self._keep_failure(path, write)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, executing nothing.

        Raises:
            UserError: the file cannot be read, or holds pickled objects, as files of stock DeepSpeed do.
        """
        if path in self._read:
            return self._read[path]
        content = load_content(path, map_location=map_location)
        if self.step is not None and isinstance(content, dict):
            check_origin(content, Path(path), self.step)
        return content

    def read_ahead(self, paths: Iterable[str]) -> None:
        """Read files now and keep them for `load`, until `forget`."""
        self._read = {path: self.load(path, map_location="cpu") for path in paths}

    def forget(self) -> None:
        """Drop the files that were read ahead."""
        self._read = {}

    def take_facts(self, folder: Path) -> list[FileFacts]:
        """Size and checksum of each file that this rank has written below `folder` since the last call."""
        facts, self._facts = self._facts, {}
        return [
            entry._replace(name=Path(entry.name).relative_to(folder).as_posix())
            for entry in facts.values()
            if Path(entry.name).is_relative_to(folder)
        ]

    def commit(self, info: Any) -> bool:
        """End a save on every rank.

        Raises:
            UserError: a rank could not write; all ranks raise it.
            RuntimeError: another error occurred on some rank; that rank raises the original.
        """
        failure, self._failure = self._failure, None
        defect, self._defect = self._defect, None
        line = None if defect is None else f"{type(defect).__name__}: {defect}"
        if not is_true_anywhere(failure is not None or defect is not None):
            return True
        everyone = gather((failure, line))
        if defect is not None:
            raise defect
        for rank, (error, _) in enumerate(everyone):
            if error is not None:
                message = f"checkpoint {info.tag} was not written (rank {rank}): {error}"
                raise raised_on_all_ranks(message, is_transient=isinstance(error, TransientError))
        for rank, (_, line) in enumerate(everyone):
            if line is not None:
                raise RuntimeError(f"checkpoint {info.tag} was not written: rank {rank} failed: {line}")
        return True

    def _keeping_defects(self, work: Callable[..., object]) -> Callable[..., None]:
        def keep(*arguments: Any, **named: Any) -> None:
            try:
                work(*arguments, **named)
            except Exception as error:  # `commit`, which all ranks call, raises it
                self._defect = self._defect or error

        return keep

    def _keep_failure(self, path: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # any error (full disk, unpicklable object): other ranks are waiting
            if self._failure is None:
                self._failure = write_error(path, error)


def plain_data(value: Any, where: str = "") -> Any:
    """Convert content to plain data: tensors, numbers, strings and containers.

    Containers are copied, tensors are not. `where` is the path of keys to `value`, for the error message.

    Raises:
        TypeError: an object in it could only be pickled.
    """
    kind = type(value)
    if kind in ATOMS or kind is torch.nn.Parameter:
        return value
    if where.rpartition(".")[2] == LOSS_SCALER and not isinstance(value, Mapping):
        return _plain_scaler(value, where)
    if isinstance(value, Enum):
        return plain_data(value.value, where)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        items = {key: plain_data(each, f"{where}.{key}") for key, each in value.items()}
        return kind(items) if kind in (OrderedDict, Counter) else items
    if kind in (list, set, frozenset):
        # a frozenset becomes a set, because `weights_only` loading does not support it
        return (list if kind is list else set)(plain_data(each, where) for each in value)
    if isinstance(value, tuple):
        return tuple(plain_data(each, where) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value), where)
    if isinstance(value, (int, float, str)):  # subclasses, such as named constants
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    raise TypeError(
        f"{where.lstrip('.')} is a {kind.__module__}.{kind.__qualname__}, which could only be pickled"
    )


def _plain_scaler(scaler: Any, where: str) -> Any:
    state_dict = getattr(scaler, "state_dict", None)
    if state_dict is None:
        raise TypeError(f"the engine's loss scaler, {type(scaler).__name__}, could only be pickled")
    return plain_data(state_dict(), where)


def _copy_nothing(save_path: str) -> None:
    """Replaces copying DeepSpeed's conversion script, which `megalowbit convert` makes unnecessary."""
