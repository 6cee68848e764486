"""DeepSpeed's `engine.save_checkpoint` and `engine.load_checkpoint`, as safe as the store's.

Arguments and results are DeepSpeed's. What they write has our layout and a manifest, which comes before
`latest`; what they load is verified and compared with the engine on all ranks, and cut anew where the engine
is cut in another way. Unlike the store they restore no random generators and remove no older checkpoints.
Refused: overwriting a complete checkpoint, leaving out frozen parameters, a folder without manifest, and
where DeepSpeed would do it wrong without a word, parts of a checkpoint (`checkpoint_io`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalowbit.checkpoints.contents import header_file
from megalowbit.checkpoints.plain import plain_checkpoint, way_in
from megalowbit.distributed.agreement import agree, gather, raised_on_all_ranks, succeed_together
from megalowbit.durable_files import LATEST, MANIFEST
from megalowbit.engine.checkpoints.save_and_load import load_together, save_together, verify_together
from megalowbit.engine.checkpoints.weight_exports import attach_weight_exports
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_text

logger = logging.getLogger(__name__)


def attach_checkpoint_methods(engine: Any) -> None:
    """Put both methods into an engine from `deepspeed.initialize`, and those that export weights alone."""
    methods = CheckpointMethods(engine)
    engine.save_checkpoint, engine.load_checkpoint = methods.save, methods.load
    attach_weight_exports(engine)


class CheckpointMethods:
    """The two methods of one engine.

    Args:
        engine: with an `AtomicCheckpointEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir/tag/`; every rank must call it. See `DeepSpeedEngine.save_checkpoint`.

        Raises:
            UserError: the checkpoint exists, or could not be written; all ranks raise it.
        """
        if exclude_frozen_parameters:
            raise UserError("exclude_frozen_parameters is not supported: save them all, leave it away")
        engine = self._engine
        path = _agreed_path(save_dir, f"global_step{engine.global_steps}" if tag is None else tag)
        save_together(
            engine,
            path,
            client_state or {},
            step=engine.global_steps,
            is_latest=save_latest,
            is_named_by_user=True,
        )
        return True

    def load(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from `load_dir/tag/`; every rank must call it. See `DeepSpeedEngine.load_checkpoint`.

        Returns:
            The path of a file of the checkpoint and the client state; two Nones where `tag` is None and
            there is no `latest`.

        Raises:
            UserError: it is damaged, incomplete, or does not fit; all ranks raise it.
        """
        if all(gather(tag is None)):
            tag = agree(_latest, Path(load_dir))
            if tag is None:
                return None, None
        path = _agreed_path(load_dir, tag)
        defaults = (
            ("load_module_strict", load_module_strict, True),
            ("load_optimizer_states", load_optimizer_states, True),
            ("load_lr_scheduler_states", load_lr_scheduler_states, True),
            ("load_module_only", load_module_only, False),
            ("custom_load_fn", custom_load_fn, None),
        )
        options = {name: value for name, value, default in defaults if value != default}
        agree(_check_complete, path)
        verify_together(path, remedy="use another checkpoint")
        _, client_state = load_together(self._engine, path, options)
        return str(header_file(path)), client_state


def _path(folder: str | Path, tag: object) -> Path:
    name = str(tag)
    if not str(folder):
        raise UserError("the folder of a checkpoint is '': name one")
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise UserError(f"the tag of a checkpoint is {shown(name)}: it must be the name of a folder")
    return Path(folder) / name


def _agreed_path(folder: str | Path, tag: object) -> Path:
    """`_path`, which must be the same on every rank; collective."""
    path = succeed_together(_path, folder, tag)
    everyone = gather(str(path))
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise raised_on_all_ranks(
                f"rank {rank} names checkpoint {other}, rank 0 {everyone[0]}: use one folder and tag"
            )
    return path


def _latest(folder: Path) -> str | None:
    try:
        return read_text(folder / LATEST).strip()
    except FileNotFoundError:
        logger.warning("%s has no file %s, so nothing is loaded: pass a tag", folder, LATEST)
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / LATEST} cannot be read ({error}): pass a tag") from error


def _check_complete(path: Path) -> None:
    if path.is_dir() and not (path / MANIFEST).is_file():
        remedy = "use another" if plain_checkpoint(path) is None else way_in(path)
        raise UserError(
            f"checkpoint {path} has no {MANIFEST}: its save was interrupted, or it was written by another "
            f"program; {remedy}"
        )
