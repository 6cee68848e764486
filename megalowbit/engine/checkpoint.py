"""Checkpoints that are complete or do not count, and that say so when they are damaged.

`folder/step-00000040/` holds DeepSpeed's files and, written last, `manifest.json` with size and SHA-256 of
each: the commit mark. A folder without it is what a killed process left; it is ignored and, in time,
removed. Every rank's random generators are saved, and what else is a rank's own in `rank_00000.pt` and so
on, so that a resumed run is bitwise the run that was not stopped. What can fail on one rank is decided by
rank 0 and raised by all. Names are never used twice: a complete checkpoint is not overwritten. `latest` is
kept for DeepSpeed's own tools. Loading executes pickled code, as DeepSpeed's does: load only what you trust.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalowbit import process_group
from megalowbit.durable import (
    LATEST,
    MANIFEST,
    atomic_file,
    complete_steps,
    step_name,
    steps_in,
    verify_folder,
    write_manifest,
)
from megalowbit.engine.agreement import agree
from megalowbit.engine.random_state import (
    random_state,
    restore_random_state,
    seed_missing_rank,
    state_of_rank,
)
from megalowbit.errors import UserError

logger = logging.getLogger(__name__)

ENGINE_KEY = "megalowbit_engine"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: shared by all ranks; made by the first save.
        keep: how many of the newest to keep; None keeps all.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"keep must be ≥ 1, or None to keep all checkpoints, not {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return complete_steps(self.folder)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on every rank; every rank must call it.

        Incomplete ones are named in the log and passed over.
        """
        return agree(self._latest)

    def _latest(self) -> Path | None:
        newest = max(self.steps(), default=-1)
        for step in steps_in(self.folder):
            if step > newest:
                logger.warning("%s is incomplete (its save was interrupted): ignored", self.path_of(step))
        return None if newest < 0 else self.path_of(newest)

    def save(
        self,
        engine: Any,
        step: int,
        client_state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint; every rank must call it, between optimizer steps.

        Args:
            engine: from `initialize`.
            step: names the checkpoint.
            client_state: rank 0's is saved; picklable.
            rank_state: every rank's own is saved, for `rank_state`; tensors and plain values.

        Raises:
            UserError: the step has a complete checkpoint, or it could not be written; all ranks raise it and
                earlier checkpoints are as they were.
        """
        if engine.micro_steps % engine.gradient_accumulation_steps():
            raise UserError(
                "save between optimizer steps: gradients of a half-accumulated step are not saved"
            )
        path = self.path_of(step)
        agree(lambda: self._begin(path))
        state = {**client_state, ENGINE_KEY: self._engine_state(engine, step, client_state)}
        if rank_state:
            engine.checkpoint_engine.save(dict(rank_state), str(path / _rank_file(process_group.rank())))
        try:
            engine.save_checkpoint(str(self.folder), tag=path.name, client_state=state, save_latest=False)
            agree(lambda: self._commit(path))
        except UserError:
            if process_group.rank() == 0:
                _remove(path)
            raise
        return path

    def verify(self, path: str | Path) -> None:
        """Compare a checkpoint's files with its manifest.

        Raises:
            UserError: names the file that is missing or damaged, what was expected and found.
        """
        path = Path(path)
        verify_folder(path, remedy=self._remedy(path))

    def load(self, engine: Any, path: str | Path) -> dict[str, Any]:
        """Verify a checkpoint and continue from it; every rank must call it.

        Weights, optimizer, scaler, scheduler, counters and this rank's random generators are restored.

        Returns:
            The `client_state` it was saved with.

        Raises:
            UserError: it is damaged, or it is of another model; all ranks raise it.
        """
        path = Path(path)
        agree(lambda: self.verify(path))
        try:
            loaded, state = engine.load_checkpoint(str(path.parent), tag=path.name)
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"checkpoint {path} does not fit the model: {reason}; use the model it was saved with"
            ) from error
        if loaded is None or ENGINE_KEY not in state:
            raise UserError(f"checkpoint {path} is of another program: start from its weights instead")
        own = state[ENGINE_KEY]
        self._restore_random(own, engine.device)
        return {key: state[key] for key in own["client_keys"]}

    def rank_state(self, path: str | Path) -> dict[str, Any] | None:
        """What this rank saved as its own in a checkpoint that has been loaded, or `None`."""
        file = Path(path) / _rank_file(process_group.rank())
        if not file.is_file():
            return None
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return state

    def _begin(self, path: Path) -> None:
        if (path / MANIFEST).is_file():
            raise UserError(
                f"checkpoint {path} exists already and is not overwritten: remove it, or use another folder"
            )
        try:
            if path.exists():
                logger.warning("%s is incomplete (its save was interrupted): replaced", path)
                shutil.rmtree(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"checkpoint {describe_write_error(path, error)}") from error

    def _engine_state(self, engine: Any, step: int, client_state: Mapping[str, Any]) -> dict[str, Any]:
        mine = random_state(engine.device)
        states: list[Any] = [mine]
        if process_group.world_size() > 1:
            states = [None] * process_group.world_size()
            dist.all_gather_object(states, mine)
        return {"format": 1, "step": step, "client_keys": list(client_state), "random_states": states}

    def _commit(self, path: Path) -> None:
        """Rank 0, all files written: manifest, `latest`, removal of old checkpoints."""
        try:
            write_manifest(path)
            with atomic_file(self.folder / LATEST) as file:
                file.write(path.name)
        except OSError as error:
            raise UserError(f"checkpoint {describe_write_error(path, error)}") from error
        self._prune()

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps if self.keep is None else steps[-self.keep :])
        for step in steps_in(self.folder):
            if step not in kept and step < steps[-1]:
                _remove(self.path_of(step))

    def _remedy(self, path: Path) -> str:
        others = [self.path_of(step) for step in self.steps() if self.path_of(step).name != path.name]
        if others:
            return f"remove {path.name} and resume from {others[-1]}"
        return "there is no other checkpoint here: start anew"

    def _restore_random(self, own: Mapping[str, Any], device: torch.device) -> None:
        rank, states = process_group.rank(), own["random_states"]
        state = state_of_rank(states, rank)
        if len(states) != process_group.world_size() and rank == 0:
            logger.warning(
                "checkpoint of %d processes continued with %d: losses will differ from the stopped run",
                len(states), process_group.world_size(),
            )  # fmt: skip
        if state is not None:
            restore_random_state(state, device)
            return
        seed = seed_missing_rank(own["step"], rank)
        logger.warning("rank %d was not part of the saved run: its generators start from seed %d", rank, seed)


def describe_write_error(path: str | Path, error: Exception) -> str:
    """One line: which file, why, what to do."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return f"{path}: {reason}; free space or choose another folder (earlier checkpoints are untouched)"


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first: an interrupted removal must not look like a checkpoint."""
    try:
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", path, error)
