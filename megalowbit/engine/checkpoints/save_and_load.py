"""One checkpoint in and out of an engine, on all ranks together: for the store and for DeepSpeed's methods.

What fails on one rank is raised by all, so that none goes on alone into the next collective. DeepSpeed's own
loader is run only on files that are verified, of a model, update rule and layout that have been compared; at
stage 3, where it communicates, its files are read before it starts. Not covered: a rank that runs out of
memory inside that loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.checkpoints.contents import CheckpointContents, check_files
from megalowbit.checkpoints.layout import ENGINE_KEY, LAYOUT_KEY, RANK_FILES_KEY
from megalowbit.checkpoints.shards import reading, write_error
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import agree, failing_together, gather, gather_bytes, succeed_together
from megalowbit.distributed.generator_states import packed_random_state
from megalowbit.durable_files import (
    LATEST,
    MANIFEST,
    SAVING,
    FileFacts,
    atomic_file,
    is_file,
    is_rest_of_save,
    remove_folder,
    set_aside,
    verify_folder,
    write_manifest,
)
from megalowbit.engine.checkpoints.layout import describe_layout
from megalowbit.engine.checkpoints.reshape import check_fits, load_reshaped
from megalowbit.engine.run_checks.model import check_scaler
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.state_dict_layout import parameter_layout
from megalowbit.optim.schedules.scheduler import LRScheduler

logger = logging.getLogger(__name__)

ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
# what DeepSpeed's loader raises where states have other keys, shapes or kinds than the engine's
MISFITS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
WHOLE: Mapping[str, Any] = MappingProxyType({})  # options of a load that takes everything


def begin_folder(path: Path, *, is_named_by_user: bool = False) -> None:
    """Make the folder of a checkpoint; rank 0, before anything is written.

    A folder that the user has named may hold anything, and is left where it is.

    Raises:
        UserError: there is a complete checkpoint, or something else, or it cannot be made.
    """
    if is_file(path / MANIFEST):
        raise UserError(
            f"checkpoint {path} exists already and is not overwritten: remove it, or use another folder"
        )
    is_there, is_rest = os.path.lexists(path), is_rest_of_save(path)
    if is_named_by_user and is_there and not is_rest:
        raise UserError(
            f"{path} is there already and is no checkpoint with a {MANIFEST}: use another tag, or remove it"
        )
    try:
        if is_rest:
            logger.warning("%s is incomplete (its save was interrupted): replaced", path)
            remove_folder(path)
        elif is_there:
            logger.warning("%s has no %s: moved to %s", path, MANIFEST, set_aside(path).name)
        path.mkdir(parents=True)
        (path / SAVING).touch()
    except OSError as error:
        raise write_error(f"checkpoint {path}", error) from error


def save_together(
    engine: Any,
    path: Path,
    client_state: Mapping[str, Any],
    *,
    step: int,
    rank_file: tuple[str, Mapping[str, Any]] | None = None,
    is_latest: bool = True,
    is_named_by_user: bool = False,
) -> None:
    """Write a checkpoint, or leave nothing; every rank must call it, between optimizer steps.

    Of `client_state` rank 0's is saved; `rank_file` is name and content of a file of this rank's own. With
    `is_latest` the file `latest` beside the checkpoint names it. Where a rank is lost when all is written,
    the checkpoint stays, and what that raises is raised.

    Raises:
        UserError: there is one already, or some rank could not write; all ranks raise it.
    """
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise UserError("save between optimizer steps: gradients of a half-accumulated step are not saved")
    agree(begin_folder, path, is_named_by_user=is_named_by_user)
    try:
        facts = _write_files(engine, path, client_state, step=step, rank_file=rank_file)
        agree(_commit, path, facts, is_latest=is_latest, is_latest_needed=is_named_by_user)
    except Exception as error:  # goes on its way: a folder that is not complete is in nobody's
        engine.checkpoint_engine.take_facts(path)
        # one that is complete stays where only the others could not be told of it
        is_complete = not isinstance(error, UserError) and is_file(path / MANIFEST)
        if process_group.rank() == 0 and not is_complete:
            remove_checkpoint(path)
        raise


def _commit(path: Path, facts: Iterable[FileFacts], *, is_latest: bool, is_latest_needed: bool) -> None:
    """Rank 0, all files written: the manifest, then `latest`, which only loads without a tag depend on."""
    try:
        write_manifest(path, facts)
        if is_latest and is_latest_needed:
            _write_latest(path)
    except OSError as error:
        raise write_error(f"checkpoint {path}", error) from error
    if is_latest and not is_latest_needed:
        point_latest_at(path)


def point_latest_at(path: Path) -> None:
    """Let `latest`, which only other programs read, name a checkpoint; a failure is logged."""
    try:
        _write_latest(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path.parent / LATEST, error.strerror)


def _write_latest(path: Path) -> None:
    with atomic_file(path.parent / LATEST) as file:
        file.write(path.name)


def _write_files(
    engine: Any,
    path: Path,
    client_state: Mapping[str, Any],
    *,
    step: int,
    rank_file: tuple[str, Mapping[str, Any]] | None,
) -> list[FileFacts]:
    """All but the manifest; what that will say of the files of all ranks."""
    writer = engine.checkpoint_engine
    writer.take_facts(path)
    own = _engine_state(engine, step, client_state, rank_file)
    state = {**client_state, ENGINE_KEY: own}
    save = type(engine).save_checkpoint  # and not the method of the object, which leads here
    with writer.of_step(step), parameter_layout(engine.module):
        if rank_file is not None:
            writer.save(dict(rank_file[1]), str(path / rank_file[0]))
        save(engine, str(path.parent), tag=path.name, client_state=state, save_latest=False)
    facts = succeed_together(writer.take_facts, path)
    return [entry for each in gather(facts) for entry in each]


def verify_together(path: Path, *, remedy: str, step: int | None = None) -> None:
    """Compare a checkpoint's files with manifest and layout; the ranks share the reading.

    `remedy` closes the messages; `step` is what the checkpoint should be of, None: anything.

    Raises:
        UserError: a file is missing or damaged; all ranks raise it.
    """
    rank, size = process_group.rank(), process_group.world_size()
    succeed_together(verify_folder, path, remedy=remedy, share=rank, shares=size)
    succeed_together(check_files, path, remedy=remedy, step=step)


def load_together(
    engine: Any, path: Path, options: Mapping[str, Any] = WHOLE
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Continue from a verified checkpoint; every rank must call it.

    `options` are arguments of DeepSpeed's `load_checkpoint` that are not its defaults.

    Returns:
        The engine's own part of what was saved, and the client state.

    Raises:
        UserError: it is of another model, update rule or program, or has replaced the scaler; all ranks
            raise it.
    """
    with failing_together(), reading(f"checkpoint {path}"):
        contents = CheckpointContents(path)
    own = contents.header.get(ENGINE_KEY)
    if not isinstance(own, dict):
        raise UserError(f"checkpoint {path} is of another program: start from its weights instead")
    takes_states = not _leaves_masters(options)
    if takes_states:
        succeed_together(_check_update_rule, path, own, engine)
    present = None if contents.layout is None else describe_layout(engine)
    if present is not None:
        recipes = own.get("recipe"), recipes_of(engine)
        succeed_together(check_fits, contents, present, recipes=recipes)
    if contents.layout is None or present is None or contents.layout == present:
        with engine.checkpoint_engine.of_step(own.get("step")):
            state = _load_as_saved(engine, path, options)
    else:
        how = f"checkpoint of {contents.layout.describe()} continued on {present.describe()}"
        if options:
            raise UserError(f"{how}: not with {', '.join(options)}; leave it away, or use the same layout")
        if process_group.rank() == 0:
            logger.warning("%s", how)
        load_reshaped(engine, contents, present)
        state = contents.header
    if isinstance(engine.lr_scheduler, LRScheduler):
        engine.lr_scheduler.write_rates()  # from stage 1 on DeepSpeed loads the groups after the schedule
    if takes_states:
        with failing_together(), reading(f"the loss scaler's state in checkpoint {path}"):
            restore_scaler(engine, own)
    succeed_together(check_scaler, engine)
    return own, {key: state[key] for key in own["client_keys"]}


def restore_scaler(engine: Any, own: Mapping[str, Any]) -> None:
    """Give the scaler at work the state it was saved with; at every stage it is the same one."""
    scaler, saved = engine.optimizer.grad_scaler, own.get("grad_scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)


def update_rule(engine: Any) -> str:
    """What steps the parameters: `AdamW`, `SGD`; implementations of one rule have one name."""
    inner = engine.optimizer.optimizer
    name = type(inner).__name__
    if name not in ADAMS:
        return name
    is_decoupled = inner.param_groups[0].get(
        "decoupled_weight_decay", getattr(inner, "adam_w_mode", name == "AdamW")
    )
    return "AdamW" if is_decoupled else "Adam"


def recipes_of(engine: Any) -> str:
    """Names of the recipes at work in this rank's layers."""
    layers = [module for module in engine.module.modules() if isinstance(module, BitLinear)]
    return ", ".join(sorted({layer.recipe.name for layer in layers})) or "none"


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint under another name: an interrupted removal must not look like a checkpoint."""
    try:
        remove_folder(path)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", path, error)


def _load_as_saved(engine: Any, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """By DeepSpeed's own loader, into an engine cut as the saved one was."""
    if engine.zero_optimization_stage() < 3:
        return succeed_together(_load_with_deepspeed, engine, path, options)
    if _leaves_masters(options):
        raise UserError(
            f"{', '.join(options)}: ZeRO 3 has its weights in the optimizer's files only; load all of "
            f"{path}, or export it and start from that"
        )
    # loading is collective: what can fail on one rank alone must have happened before
    parent, tag = str(path.parent), path.name
    files = [engine._get_ckpt_name(parent, tag), engine._get_zero_ckpt_name(parent, tag)]
    reader = engine.checkpoint_engine
    succeed_together(reader.read_ahead, files)
    try:
        return _load_with_deepspeed(engine, path, options)
    finally:
        reader.forget()


def _load_with_deepspeed(engine: Any, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    load = type(engine).load_checkpoint  # and not the method of the object, which leads here
    try:
        with parameter_layout(engine.module):
            _, state = load(engine, str(path.parent), tag=path.name, **options)
    except (UserError, torch.OutOfMemoryError, dist.DistError):
        raise
    except MISFITS as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"checkpoint {path} does not fit the model: {reason}; use the model it was saved with"
        ) from error
    if engine.zero_optimization_stage() == 0 and _leaves_masters(options):
        engine.optimizer.reload_model_params()  # or the next step would undo the load
    return dict(state)


def _leaves_masters(options: Mapping[str, Any]) -> bool:
    return bool(options.get("load_module_only")) or not options.get("load_optimizer_states", True)


def _check_update_rule(path: Path, own: Mapping[str, Any], engine: Any) -> None:
    saved, present = own.get("optimizer"), update_rule(engine)
    if saved not in (None, present):
        raise UserError(
            f"checkpoint {path} has the state of optimizer {saved}, the engine has {present}: use {saved}, "
            "or start from its weights"
        )


def _engine_state(
    engine: Any, step: int, client_state: Mapping[str, Any], rank_file: tuple[str, Any] | None
) -> dict[str, Any]:
    with failing_together():  # before any rank waits for the others' generators
        scaler = engine.optimizer.grad_scaler
        own: dict[str, Any] = {
            "format": 1,
            "step": step,
            "client_keys": list(dict(client_state)),
            "random_states": packed_random_state(engine.device),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": update_rule(engine),
            "recipe": recipes_of(engine),
        }
    states = gather_bytes(own["random_states"])
    rank_files = [name for name in gather(None if rank_file is None else rank_file[0]) if name is not None]
    return {
        **own,
        "random_states": states,
        RANK_FILES_KEY: rank_files,
        LAYOUT_KEY: describe_layout(engine).to_dict(),
    }
