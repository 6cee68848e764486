"""A DeepSpeed checkpoint engine whose files are atomic and whose errors reach every rank.

DeepSpeed writes in place, and an error on the writing rank leaves the others waiting in a barrier. Here
errors are kept until `commit`, which every rank calls, and raised there by all of them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megalowbit import process_group
from megalowbit.durable import atomic_file
from megalowbit.engine.checkpoint import describe_write_error
from megalowbit.errors import UserError


class AtomicCheckpointEngine(TorchCheckpointEngine):
    """`TorchCheckpointEngine` with atomic files and errors that reach every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.zipfile_serialization = True
        self._failure: str | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder; a failure is raised by `commit`."""
        self._keep_failure(path, lambda: os.makedirs(path, exist_ok=exist_ok))  # noqa: PTH103

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; a failure is raised by `commit`."""

        def write() -> None:
            with atomic_file(Path(path), "wb") as file:
                torch.save(state_dict, file)

        self._keep_failure(path, write)

    def commit(self, info: Any) -> bool:
        """End a save on every rank.

        Raises:
            UserError: some rank could not write; all ranks raise it.
        """
        failure, self._failure = self._failure, None
        failures = [failure]
        if process_group.world_size() > 1:
            failures = [None] * process_group.world_size()
            dist.all_gather_object(failures, failure)
        for rank, message in enumerate(failures):
            if message is not None:
                raise UserError(f"checkpoint {info.tag} was not written (rank {rank}): {message}")
        return True

    def _keep_failure(self, path: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is (a full disk, an unpicklable object): others wait for us
            if self._failure is None:
                self._failure = describe_write_error(path, error)
