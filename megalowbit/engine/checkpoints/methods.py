"""Replaces DeepSpeed's `save_checkpoint`, `load_checkpoint` and `save_16bit_model` by safe versions.

Arguments and results are DeepSpeed's.

- `engine.save_checkpoint` writes our layout and a manifest, and updates `latest` after the manifest.
- `engine.load_checkpoint` verifies the files on all ranks, checks that they fit the engine, and re-shards
  them if the engine has another layout.
- The position of the random stream, from which layers draw, is saved and restored with the optimizer's state.
  Unlike the store, neither method restores other random generators or removes older checkpoints.
- Rejected: overwriting a complete checkpoint, leaving out frozen parameters, a folder without a manifest, and
  partial loads that DeepSpeed would silently get wrong (`save_and_load`).

DeepSpeed builds the state dicts of `engine.save_16bit_model`, `accelerator.get_state_dict` and the Trainer
directly from parameters. That would be wrong for us: at stage 3 a converted Conv1D would be (out, in) instead
of (in, out), under tensor parallelism the tensors would be one rank's shards, and a pipeline would give
nothing. Here they are full tensors in transformers' layout, and the file is written atomically.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from megalowbit.checkpoints.contents import header_file
from megalowbit.checkpoints.plain import loading_advice, plain_checkpoint
from megalowbit.checkpoints.shards import write_error
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import agree, gather, raised_on_all_ranks, succeed_together
from megalowbit.durable_files import LATEST, MANIFEST, atomic_file
from megalowbit.engine.checkpoints.save_and_load import (
    load_together,
    restore_random_stream,
    restores_states,
    save_together,
    verify_together,
)
from megalowbit.engine.parameters.full_weights import full_state_dict
from megalowbit.engine.pipeline.setup import gather_weights, stage_of
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_text

logger = logging.getLogger(__name__)


def attach_checkpoint_methods(engine: Any) -> None:
    """Replace the methods of an engine from `deepspeed.initialize` by the functions below."""
    engine.save_checkpoint = MethodType(save_checkpoint, engine)
    engine.load_checkpoint = MethodType(load_checkpoint, engine)
    engine.save_16bit_model = engine.save_fp16_model = MethodType(save_16bit_model, engine)
    engine._zero3_consolidated_16bit_state_dict = MethodType(consolidated_state_dict, engine)
    engine._replace_module_consolidated_state_dict = MethodType(consolidated_state_dict, engine)


def save_checkpoint(
    engine: Any,
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
        raise UserError("exclude_frozen_parameters is not supported: leave it out, all parameters are saved")
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


def load_checkpoint(
    engine: Any,
    load_dir: str | Path,
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Continue from `load_dir/tag/`; every rank must call it. See `DeepSpeedEngine.load_checkpoint`.

    Micro-batches since the last step are dropped: the next one is the first of a step.

    Returns:
        The path of one of the checkpoint's files and the client state; two Nones if `tag` is None and there
        is no `latest`.

    Raises:
        UserError: the checkpoint is damaged or incomplete, or does not fit; all ranks raise it.
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
    own, client_state = load_together(engine, path, options)
    engine.zero_grad()  # gradients of the weights before
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    if restores_states(options):
        restore_random_stream(engine, own, path)
    return str(header_file(path)), client_state


def consolidated_state_dict(
    engine: Any, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor] | None:
    """The full state dict on rank 0, None on others. See `DeepSpeedEngine._consolidated_16bit_state_dict`.

    Raises:
        UserError: `exclude_frozen_parameters` is set for a pipeline.
    """
    stage = stage_of(engine.module)
    if stage is not None and exclude_frozen_parameters:
        raise UserError("exclude_frozen_parameters is not supported for a pipeline: leave it out")
    if stage is not None:
        return gather_weights(stage)
    state = full_state_dict(engine, exclude_frozen=exclude_frozen_parameters)
    return state if process_group.rank() == 0 else None


def save_16bit_model(
    engine: Any,
    save_dir: str | Path,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the full state dict to `save_dir/save_filename`. See `DeepSpeedEngine.save_16bit_model`.

    Returns:
        Whether the file was written; False if the stage 3 configuration does not allow gathering.

    Raises:
        UserError: the file could not be written, or as for `consolidated_state_dict`; all ranks raise it.
    """
    path = Path(save_dir) / save_filename
    if engine.zero_optimization_stage() == 3 and not engine.zero_gather_16bit_weights_on_model_save():
        if process_group.rank() == 0:
            key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            logger.warning("%s is not written: %s is false", path, key)
        return False
    state = consolidated_state_dict(engine, exclude_frozen_parameters)
    agree(_write, state, path)
    return True


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
                f"rank {rank} was given checkpoint {other}, but rank 0 {everyone[0]}: use one folder and tag"
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
        remedy = "use another" if plain_checkpoint(path) is None else loading_advice(path)
        raise UserError(
            f"checkpoint {path} has no {MANIFEST}: its save was interrupted, or it was written by another "
            f"program; {remedy}"
        )


def _write(state: dict[str, torch.Tensor] | None, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        raise write_error(path, error) from error
