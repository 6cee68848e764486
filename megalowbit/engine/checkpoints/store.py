"""The checkpoints of a run: saved completely or ignored, verified before they are loaded.

    folder/step-00000040/
        …                  DeepSpeed's files
        rank_00000.pt      further state of each rank
        manifest.json      size and SHA-256 of every file; written last, it marks the checkpoint complete

- A folder without a manifest is ignored. If a killed process left it (it has a `.saving` file), it is removed
  later; otherwise it is moved aside.
- A damaged checkpoint is moved aside with a log line, and the one before it is used.
- Every rank's random generators are saved, so a resumed run is bitwise the uninterrupted run. At another ZeRO
  stage or number of ranks (`reshape`) only the order of sums differs.
- An error on one rank is raised on all. A complete checkpoint is never overwritten. Loading executes nothing.
- `latest` is kept for DeepSpeed's tools.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megalowbit.checkpoints.contents import check_files, header_file
from megalowbit.checkpoints.layout import ENGINE_KEY, LAYOUT_KEY
from megalowbit.checkpoints.shards import ORIGIN_KEY, check_origin, load_file, reading
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import agree, failing_together
from megalowbit.distributed.generator_states import (
    has_same_sharding,
    restore_random_state,
    saved_random_state,
    saved_rank_of,
    seed_generators,
)
from megalowbit.durable_files import (
    MANIFEST,
    complete_steps,
    damaged_in,
    has_all_files,
    is_file,
    is_interrupted_save,
    is_step_name,
    remove_drafts,
    set_aside,
    step_name,
    steps_in,
    verify_folder,
)
from megalowbit.engine.checkpoints.save_and_load import (
    load_together,
    point_at,
    point_latest_at,
    remove_checkpoint,
    save_together,
    verify_together,
)
from megalowbit.errors import TransientError, UserError, file_system_error, shown
from megalowbit.values import whole_number

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: shared by all ranks; created by the first save.
        keep: number of newest checkpoints to keep; None keeps all.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if not isinstance(folder, (str, Path)):
            raise UserError(f"CheckpointStore takes the path of a folder, not {shown(folder)}: pass a string")
        self.folder = Path(folder)
        self.keep = None if keep is None else whole_number("keep", keep, least=1, other="None to keep all")
        self._verified: set[Path] = set()  # checkpoints verified by this process

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return complete_steps(self.folder)

    def latest(self, *, until: int | None = None, every: int = 1) -> Path | None:
        """The newest good checkpoint, the same on every rank; every rank must call it.

        Incomplete checkpoints are logged and skipped, damaged ones are moved aside. The ranks divide the
        files to verify among them. With `until`, a checkpoint is verified again even if it was before.

        Args:
            until: only consider checkpoints up to this step.
            every: only consider multiples of this step.

        Raises:
            UserError: all checkpoints are damaged, including those found earlier.
        """
        agree(self._warn_of_incomplete)
        while (path := agree(self._newest, until, every)) is not None:
            if until is not None:
                self._verified.discard(path)  # it may have been damaged since, perhaps hours ago
            reason = self._damage_of(path)
            if reason is None:
                return path
            agree(self._set_aside, path, reason)
        if aside := agree(self._only_damaged):
            raise UserError(
                f"all {len(aside)} checkpoints in {self.folder} are damaged (newest: {aside[-1]}): start "
                "again in another folder, or repair one and remove .damaged from its name"
            )
        return None

    def _only_damaged(self) -> list[str]:
        """Names of damaged checkpoints if there are no others, else an empty list."""
        return [] if self.steps() else damaged_in(self.folder)

    def _newest(self, until: int | None, every: int) -> Path | None:
        steps = [step for step in self.steps() if (until is None or step <= until) and step % every == 0]
        return self.path_of(steps[-1]) if steps else None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which will be repeated; every rank must call it.

        Args:
            step: has a complete checkpoint, which becomes the newest.
        """
        self._verified.difference_update(agree(self._remove_after, step))

    def _remove_after(self, step: int) -> list[Path]:
        later = [self.path_of(each) for each in steps_in(self.folder) if each > step]
        point_latest_at(self.path_of(step))
        for path in reversed(later):
            if is_file(path / MANIFEST):
                self._remove(path)
            else:
                self._clear_incomplete(path)
        return later

    def _warn_of_incomplete(self) -> None:
        newest = max(self.steps(), default=-1)
        for step in steps_in(self.folder):
            if step > newest:
                path = self.path_of(step)
                reason = "its save was interrupted" if is_interrupted_save(path) else f"it has no {MANIFEST}"
                logger.warning("%s is incomplete (%s): ignored", path, reason)

    def _damage_of(self, path: Path) -> str | None:
        """Why a checkpoint is damaged, the same on every rank; None if it is not."""
        if path in self._verified:
            return None
        try:
            self._verify_together(path)
        except TransientError:
            raise
        except UserError as error:
            return str(error)
        return None

    def _verify_together(self, path: Path) -> None:
        verify_together(path, remedy=agree(self._remedy, path), step=self._step_of(path))
        self._verified.add(path)

    def _set_aside(self, path: Path, reason: str) -> None:
        self._remove_names_of(path)
        try:
            target = set_aside(path)
        except OSError as error:
            message = f"{reason}; it could not be moved aside ({error.strerror})"
            raise file_system_error(message, error) from error
        logger.warning("%s: moved to %s", reason.partition(";")[0], target.name)

    def save(
        self,
        engine: Any,
        step: int,
        client_state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        spare: Collection[int] = (),
    ) -> Path:
        """Write a checkpoint; every rank must call it, between optimizer steps.

        Args:
            engine: from `initialize`.
            step: names the checkpoint.
            client_state: rank 0's is saved; picklable.
            rank_state: saved on every rank, to be read by the method `rank_state`; tensors and plain values.
            spare: steps whose checkpoints are kept in addition to the newest `keep`.

        Raises:
            UserError: the step has a complete checkpoint, or it could not be written; all ranks raise it, and
                earlier checkpoints are unchanged.
        """
        path = self.path_of(step)
        rank_file = (_rank_file(process_group.rank()), rank_state) if rank_state else None
        save_together(engine, path, client_state, step=step, rank_file=rank_file)
        agree(self._prune, path, spare)
        self._verified.discard(path)
        return path

    def verify(self, path: str | Path) -> None:
        """Compare a checkpoint's files with its manifest.

        Raises:
            UserError: names the missing or damaged file, and the expected and actual value.
        """
        path = Path(path)
        verify_folder(path, remedy=self._remedy(path))
        check_files(path, remedy=self._remedy(path), step=self._step_of(path))

    def load(self, engine: Any, path: str | Path) -> dict[str, Any]:
        """Verify a checkpoint and continue from it; every rank must call it.

        Weights, optimizer, scaler, scheduler, counters and this rank's random generators are restored.

        Returns:
            The `client_state` it was saved with.

        Raises:
            UserError: it is damaged, or from another model; all ranks raise it.
        """
        path = Path(path)
        if path not in self._verified:
            self._verify_together(path)
        own, client_state = load_together(engine, path)
        with failing_together(), reading(f"the random generators' states in checkpoint {path}"):
            self._restore_random(own, engine)
        return client_state

    def rank_state(self, engine: Any, path: str | Path) -> dict[str, Any] | None:
        """The `rank_state` saved by the rank at this rank's place in the process grid.

        Args:
            engine: from `initialize`.
            path: of a verified checkpoint.

        Returns:
            The state; None if there is none, or if the run had other TP or PP sizes.

        Raises:
            UserError: it cannot be read on some rank; all ranks raise it.
        """
        with failing_together(), reading(f"checkpoint {path}"):
            own = load_file(header_file(Path(path)))[ENGINE_KEY]
            layout, grid = own.get(LAYOUT_KEY), engine.process_grid
            if not has_same_sharding(layout, grid):
                return None
            rank = saved_rank_of(layout, len(own["random_states"]), grid)
            if rank is None or not (file := Path(path) / _rank_file(rank)).is_file():
                return None
            state = load_file(file, is_mapped=False)
            check_origin(state, file, own["step"])
            return {key: value for key, value in state.items() if key != ORIGIN_KEY}

    def _clear_incomplete(self, path: Path) -> None:
        """Remove the rest of an interrupted save; move a folder that lost its manifest aside."""
        if is_interrupted_save(path):
            remove_checkpoint(path)
        else:
            self._set_aside(path, f"checkpoint {path} has no {MANIFEST}")

    def name_checkpoints(self, named: Mapping[str, int | None]) -> None:
        """Write files such as `best`, each with the name of a step's checkpoint; every rank must call it.

        None removes the file. Like `latest`, they are for other programs: a failure is logged only.
        """
        if named:
            agree(self._name_checkpoints, named)

    def _name_checkpoints(self, named: Mapping[str, int | None]) -> None:
        for name, step in named.items():
            if step is not None:
                point_at(self.path_of(step), name)
                continue
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", self.folder / name, error.strerror)

    def _remove(self, path: Path) -> None:
        self._remove_names_of(path)
        remove_checkpoint(path)

    def _remove_names_of(self, path: Path) -> None:
        """Remove files such as `best` that name a checkpoint which goes; what has written them may be off."""
        for file in self.folder.iterdir():
            try:
                if is_file(file) and file.stat().st_size == len(path.name) and file.read_text() == path.name:
                    file.unlink()
            except (OSError, UnicodeDecodeError) as error:
                logger.warning("%s cannot be removed: %s", file, error)

    def _prune(self, saved: Path, spare: Collection[int]) -> None:
        """Remove all checkpoints but the newest `keep` complete ones, `spare` and `saved`.

        Damaged checkpoints do not count towards `keep`. Errors are only logged, because the new checkpoint
        has already been saved.
        """
        try:
            remove_drafts(self.folder)
            steps = self.steps()
            complete = [step for step in steps if has_all_files(self.path_of(step))]
            kept = set(complete if self.keep is None else complete[-self.keep :])
            kept |= {step for step in complete if self.path_of(step) == saved or step in spare}
            for step in steps_in(self.folder):
                if step in steps and step not in complete:
                    self._set_aside(self.path_of(step), f"checkpoint {self.path_of(step)} lacks files")
                elif step not in kept and step < steps[-1]:
                    if step in steps:
                        self._remove(self.path_of(step))
                    else:
                        self._clear_incomplete(self.path_of(step))
        except (OSError, UserError) as error:
            logger.warning("older checkpoints in %s are not removed: %s", self.folder, error)

    def _step_of(self, path: Path) -> int | None:
        """The step in the name of a checkpoint; None for another name."""
        return int(path.name.removeprefix("step-")) if is_step_name(path.name) else None

    def _remedy(self, path: Path) -> str:
        others = [self.path_of(step) for step in self.steps() if self.path_of(step).name != path.name]
        if others:
            return f"remove {path.name} and resume from {others[-1]}"
        return "there is no other checkpoint here: start again"

    def _restore_random(self, own: Mapping[str, Any], engine: Any) -> None:
        rank, states = process_group.rank(), own["random_states"]
        saved = saved_rank_of(own.get(LAYOUT_KEY), len(states), engine.process_grid)
        if len(states) != process_group.world_size() and rank == 0:
            logger.warning(
                "checkpoint of %d processes continued with %d: losses will differ from the original run's",
                len(states), process_group.world_size(),
            )  # fmt: skip
        if saved is not None:
            restore_random_state(saved_random_state(states, saved), engine.device)
            return
        seed = seed_generators(own["step"], engine.process_grid.data_rank)
        logger.warning("rank %d was not part of the saved run: its generators start from seed %d", rank, seed)


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
