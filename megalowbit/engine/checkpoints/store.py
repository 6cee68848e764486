"""Checkpoints that are complete or do not count, and that say so when they are damaged.

`folder/step-00000040/` holds DeepSpeed's files and, written last, `manifest.json` with size and SHA-256 of
each: the commit mark. A folder without it is ignored: what a killed process left (`.saving` lies in it) is
removed in time, one that has lost its manifest is moved aside. A damaged one is moved aside, with a line in
the log, and the one before is used. Every rank's random generators are saved, and what else is a rank's own
in `rank_00000.pt` and so on, so that a resumed run is bitwise the run that was not stopped; at another ZeRO
stage or number of ranks (`reshape`) it is the same run but for the order of sums. What can fail on one rank
is raised by all. Names are never used twice: a complete checkpoint is not overwritten. `latest` is kept for
DeepSpeed's own tools. Loading executes nothing.
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
    is_cut_alike,
    restore_random_state,
    saved_random_state,
    saved_rank_of,
    seed_generators,
)
from megalowbit.durable_files import (
    MANIFEST,
    complete_steps,
    damaged_in,
    is_file,
    is_rest_of_save,
    is_step_name,
    looks_whole,
    remove_drafts,
    set_aside,
    step_name,
    steps_in,
    verify_folder,
)
from megalowbit.engine.checkpoints.save_and_load import (
    load_together,
    point_latest_at,
    remove_checkpoint,
    save_together,
    verify_together,
)
from megalowbit.errors import TransientError, UserError, file_system_error
from megalowbit.values import whole_number

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: shared by all ranks; made by the first save.
        keep: how many of the newest to keep; None keeps all.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        self.folder = Path(folder)
        self.keep = None if keep is None else whole_number("keep", keep, least=1, other="None to keep all")
        self._verified: set[Path] = set()  # by this process, and nothing of ours changes them

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return complete_steps(self.folder)

    def latest(self, *, until: int | None = None, every: int = 1) -> Path | None:
        """The newest good checkpoint, the same on every rank; every rank must call it.

        Incomplete ones are named in the log and passed over, damaged ones moved aside. All ranks share the
        reading that this takes; what is looked for with `until` is read again.

        Args:
            until: look no further than this step.
            every: look at multiples of this step only.

        Raises:
            UserError: there were checkpoints, and all of them are damaged, also if that was found before.
        """
        agree(self._warn_of_incomplete)
        while (path := agree(self._newest, until, every)) is not None:
            if until is not None:
                self._verified.discard(path)  # hours may have passed; whoever goes back must not meet damage
            reason = self._damage_of(path)
            if reason is None:
                return path
            agree(self._set_aside, path, reason)
        if aside := agree(self._only_damaged):
            raise UserError(
                f"all {len(aside)} checkpoints in {self.folder} are damaged (newest: {aside[-1]}): start "
                "again in another folder, or repair one and take .damaged off its name"
            )
        return None

    def _only_damaged(self) -> list[str]:
        """Names of damaged checkpoints, where there are no others."""
        return [] if self.steps() else damaged_in(self.folder)

    def _newest(self, until: int | None, every: int) -> Path | None:
        steps = [step for step in self.steps() if (until is None or step <= until) and step % every == 0]
        return self.path_of(steps[-1]) if steps else None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which are to be trained anew; every rank must call it.

        Args:
            step: has a complete checkpoint, which is the newest then.
        """
        self._verified.difference_update(agree(self._remove_after, step))

    def _remove_after(self, step: int) -> list[Path]:
        later = [self.path_of(each) for each in steps_in(self.folder) if each > step]
        point_latest_at(self.path_of(step))
        for path in reversed(later):
            if is_file(path / MANIFEST):
                remove_checkpoint(path)
            else:
                self._clear_incomplete(path)
        return later

    def _warn_of_incomplete(self) -> None:
        newest = max(self.steps(), default=-1)
        for step in steps_in(self.folder):
            if step > newest:
                path = self.path_of(step)
                reason = "its save was interrupted" if is_rest_of_save(path) else f"it has no {MANIFEST}"
                logger.warning("%s is incomplete (%s): ignored", path, reason)

    def _damage_of(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, the same on every rank; None if it is whole."""
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
            rank_state: every rank's own is saved, for `rank_state`; tensors and plain values.
            spare: steps of checkpoints that are kept beside the newest `keep`.

        Raises:
            UserError: the step has a complete checkpoint, or it could not be written; all ranks raise it and
                earlier checkpoints are as they were.
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
            UserError: names the file that is missing or damaged, what was expected and found.
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
            UserError: it is damaged, or it is of another model; all ranks raise it.
        """
        path = Path(path)
        if path not in self._verified:
            self._verify_together(path)
        own, client_state = load_together(engine, path)
        with failing_together(), reading(f"the random generators' states in checkpoint {path}"):
            self._restore_random(own, engine)
        return client_state

    def rank_state(self, engine: Any, path: str | Path) -> dict[str, Any] | None:
        """What this rank, or the one that had its place, saved as its own in a checkpoint that is verified.

        Args:
            engine: from `initialize`.
            path: of the checkpoint.

        Returns:
            None if there is nothing, or if the model was cut over ranks in another way.

        Raises:
            UserError: it cannot be read on some rank; all ranks raise it.
        """
        with failing_together(), reading(f"checkpoint {path}"):
            own = load_file(header_file(Path(path)))[ENGINE_KEY]
            layout, grid = own.get(LAYOUT_KEY), engine.process_grid
            if not is_cut_alike(layout, grid):
                return None
            rank = saved_rank_of(layout, len(own["random_states"]), grid)
            if rank is None or not (file := Path(path) / _rank_file(rank)).is_file():
                return None
            state = load_file(file, is_mapped=False)
            check_origin(state, file, own["step"])
            return {key: value for key, value in state.items() if key != ORIGIN_KEY}

    def _clear_incomplete(self, path: Path) -> None:
        """Remove what an interrupted save has left; a folder that has lost its manifest is moved aside."""
        if is_rest_of_save(path):
            remove_checkpoint(path)
        else:
            self._set_aside(path, f"checkpoint {path} has no {MANIFEST}")

    def _prune(self, saved: Path, spare: Collection[int]) -> None:
        """Remove all but the newest `keep` whole ones, `spare` and the one just saved, maybe an earlier one.

        Damaged ones count as little as drafts. What keeps any from being removed is logged, no more: the new
        one is there.
        """
        try:
            remove_drafts(self.folder)
            steps = self.steps()
            whole = [step for step in steps if looks_whole(self.path_of(step))]
            kept = set(whole if self.keep is None else whole[-self.keep :])
            kept |= {step for step in whole if self.path_of(step) == saved or step in spare}
            for step in steps_in(self.folder):
                if step in steps and step not in whole:
                    self._set_aside(self.path_of(step), f"checkpoint {self.path_of(step)} lacks files")
                elif step not in kept and step < steps[-1]:
                    if step in steps:
                        remove_checkpoint(self.path_of(step))
                    else:
                        self._clear_incomplete(self.path_of(step))
        except (OSError, UserError) as error:
            logger.warning("older checkpoints in %s stay: %s", self.folder, error)

    def _step_of(self, path: Path) -> int | None:
        """The step that the name of a checkpoint in this folder says."""
        return int(path.name.removeprefix("step-")) if is_step_name(path.name) else None

    def _remedy(self, path: Path) -> str:
        others = [self.path_of(step) for step in self.steps() if self.path_of(step).name != path.name]
        if others:
            return f"remove {path.name} and resume from {others[-1]}"
        return "there is no other checkpoint here: start anew"

    def _restore_random(self, own: Mapping[str, Any], engine: Any) -> None:
        rank, states = process_group.rank(), own["random_states"]
        saved = saved_rank_of(own.get(LAYOUT_KEY), len(states), engine.process_grid)
        if len(states) != process_group.world_size() and rank == 0:
            logger.warning(
                "checkpoint of %d processes continued with %d: losses will differ from the stopped run",
                len(states), process_group.world_size(),
            )  # fmt: skip
        if saved is not None:
            restore_random_state(saved_random_state(states, saved), engine.device)
            return
        seed = seed_generators(own["step"], engine.process_grid.data_rank)
        logger.warning("rank %d was not part of the saved run: its generators start from seed %d", rank, seed)


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
