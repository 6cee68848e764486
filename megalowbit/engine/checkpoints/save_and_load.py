"""Saves or loads one checkpoint of an engine on all ranks; used by the store and by DeepSpeed's methods.

An error on one rank is raised on all, so no rank enters the next collective alone. DeepSpeed's loader runs
only after the files are verified and model, update rule and layout are compared. At stage 3 the loader
communicates, so all files are read before it starts. Not covered: a rank that runs out of memory inside that
loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
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
    is_interrupted_save,
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
from megalowbit.layers.conversion.carried_state import (
    continue_stream,
    continue_streams,
    draws_numbers,
    has_one_stream,
    stream_states,
)
from megalowbit.layers.conversion.convert import random_stream
from megalowbit.layers.cpu_gemm import UNRECORDED, cpu_gemm, use_cpu_gemm
from megalowbit.layers.state_dict_layout import parameter_layout
from megalowbit.optim.schedules.scheduler import LRScheduler

logger = logging.getLogger(__name__)

ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
# raised by DeepSpeed's loader if states have other keys, shapes or types than the engine's
MISFITS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})  # load everything


def begin_folder(path: Path, *, is_named_by_user: bool = False) -> None:
    """Create the folder of a checkpoint; called on rank 0 before anything is written.

    An existing folder whose name the user chose may hold anything, so it is not moved.

    Raises:
        UserError: the path already holds a complete checkpoint or something else, or cannot be created.
    """
    if is_file(path / MANIFEST):
        raise UserError(
            f"checkpoint {path} already exists and is not overwritten: remove it, or use another folder"
        )
    is_there, is_rest = os.path.lexists(path), is_interrupted_save(path)
    if is_named_by_user and is_there and not is_rest:
        raise UserError(
            f"{path} already exists and is not a checkpoint with a {MANIFEST}: use another tag, or remove it"
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
    """Write a complete checkpoint or nothing; every rank must call it, between optimizer steps.

    If a rank is lost after everything is written, the checkpoint stays and the error is raised.

    Args:
        engine: from `initialize`.
        path: folder of the checkpoint.
        client_state: rank 0's is saved.
        step: recorded in the files.
        rank_file: name and content of a file that only this rank writes.
        is_latest: whether the file `latest` next to the checkpoint shall name it.
        is_named_by_user: see `begin_folder`; `latest` must then be written successfully.

    Raises:
        UserError: the checkpoint already exists, or a rank could not write; all ranks raise it.
    """
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise UserError("save between optimizer steps: gradients of a half-accumulated step are not saved")
    agree(begin_folder, path, is_named_by_user=is_named_by_user)
    try:
        facts = _write_files(engine, path, client_state, step=step, rank_file=rank_file)
        agree(_commit, path, facts, is_latest=is_latest, is_latest_needed=is_named_by_user)
    except Exception as error:  # raised again below, after an incomplete folder is removed
        engine.checkpoint_engine.take_facts(path)
        # a complete checkpoint stays if only the communication with other ranks failed
        is_complete = not isinstance(error, UserError) and is_file(path / MANIFEST)
        if process_group.rank() == 0 and not is_complete:
            remove_checkpoint(path)
        raise


def _commit(path: Path, facts: Iterable[FileFacts], *, is_latest: bool, is_latest_needed: bool) -> None:
    """On rank 0, after all files: write the manifest, then `latest`, which only loads without a tag need."""
    try:
        write_manifest(path, facts)
        if is_latest and is_latest_needed:
            _write_name(path, LATEST)
    except OSError as error:
        raise write_error(f"checkpoint {path}", error) from error
    if is_latest and not is_latest_needed:
        point_latest_at(path)


def point_latest_at(path: Path) -> None:
    """Write the checkpoint's name to `latest`, which only other programs read; a failure is logged."""
    point_at(path, LATEST)


def point_at(path: Path, name: str) -> None:
    """Write the checkpoint's name to the file `name` beside it; a failure is logged."""
    try:
        _write_name(path, name)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path.parent / name, error.strerror)


def _write_name(path: Path, name: str) -> None:
    with atomic_file(path.parent / name) as file:
        file.write(path.name)


def _write_files(
    engine: Any,
    path: Path,
    client_state: Mapping[str, Any],
    *,
    step: int,
    rank_file: tuple[str, Mapping[str, Any]] | None,
) -> list[FileFacts]:
    """Write all files but the manifest; returns its entries for the files of all ranks."""
    writer = engine.checkpoint_engine
    writer.take_facts(path)
    own = _engine_state(engine, step, client_state, rank_file)
    state = {**client_state, ENGINE_KEY: own}
    save = type(engine).save_checkpoint  # the engine object's method is replaced and would call this function
    with writer.of_step(step), parameter_layout(engine.module):
        if rank_file is not None:
            writer.save(dict(rank_file[1]), str(path / rank_file[0]))
        save(engine, str(path.parent), tag=path.name, client_state=state, save_latest=False)
    facts = succeed_together(writer.take_facts, path)
    return [entry for each in gather(facts) for entry in each]


def verify_together(path: Path, *, remedy: str, step: int | None = None) -> None:
    """Compare a checkpoint's files with manifest and layout; the ranks divide the files among them.

    `remedy` is appended to the messages; `step` is the expected step, None: any.

    Raises:
        UserError: a file is missing or damaged; all ranks raise it.
    """
    rank, size = process_group.rank(), process_group.world_size()
    succeed_together(verify_folder, path, remedy=remedy, share=rank, shares=size)
    succeed_together(check_files, path, remedy=remedy, step=step)


def load_together(
    engine: Any, path: Path, options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Continue from a verified checkpoint; every rank must call it.

    `options` are arguments of DeepSpeed's `load_checkpoint` that differ from its defaults.

    Returns:
        The engine's part of the saved state, and the client state.

    Raises:
        UserError: the checkpoint is from another model, update rule or program, or loading it replaced the
            loss scaler; all ranks raise it.
    """
    with failing_together(), reading(f"checkpoint {path}"):
        contents = CheckpointContents(path)
    own = contents.header.get(ENGINE_KEY)
    if not isinstance(own, dict):
        raise UserError(f"checkpoint {path} was written by another program: start from its weights instead")
    takes_states = restores_states(options)
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
            raise UserError(f"{how}: not with {', '.join(options)}; leave it out, or use the same layout")
        if process_group.rank() == 0:
            logger.warning("%s", how)
        load_reshaped(engine, contents, present)
        state = contents.header
    # versions with unrounded scales did not record the other choice either
    if "cpu_gemm" not in own and has_power_of_two_scales(engine) and process_group.rank() == 0:
        logger.warning(
            "checkpoint %s was written when NVFP4's tensor scales were not rounded; now they are powers of "
            "two. The run continues: its errors are as large as before, but its numbers differ",
            path,
        )
    recorded = own.get("cpu_gemm", UNRECORDED)
    if engine.device.type == "cpu" and recorded is not None:  # None: saved on another device
        use_cpu_gemm(recorded)
    if isinstance(engine.lr_scheduler, LRScheduler):
        engine.lr_scheduler.write_rates()  # from stage 1 on, DeepSpeed loads the groups after the schedule
    if takes_states:
        with failing_together(), reading(f"the loss scaler's state in checkpoint {path}"):
            restore_scaler(engine, own)
    succeed_together(check_scaler, engine)
    return own, {key: state[key] for key in own["client_keys"]}


def restores_states(options: Mapping[str, Any]) -> bool:
    """Whether these arguments of DeepSpeed's `load_checkpoint` restore more than the model's weights."""
    return not options.get("load_module_only") and bool(options.get("load_optimizer_states", True))


def restore_random_stream(engine: Any, own: Mapping[str, Any], path: Path) -> None:
    """Let stochastic rounding continue where it was at the save; every rank must call it.

    Args:
        engine: from `initialize`.
        own: the engine's part of the saved state.
        path: of the checkpoint, for messages.

    Raises:
        UserError: the saved position is not one; all ranks raise it.
    """
    saved, of_layers = own.get("random_stream"), own.get("random_streams")
    if saved is not None or of_layers is not None:
        with failing_together(), reading(f"the random stream's state in checkpoint {path}"):
            if of_layers is not None:
                missing = continue_streams(engine.module, _of_this_rank(of_layers))
            elif saved is not None:
                missing = continue_stream(engine.module, saved)
        names = sorted({name for each in gather(missing) for name in each})
        if names and process_group.rank() == 0:
            logger.warning(
                "checkpoint %s has no position of the random stream of %s: stochastic rounding there "
                "continues with other numbers than an uninterrupted run",
                path,
                ", ".join(names),
            )
    elif any(gather(draws_numbers(engine.module))) and process_group.rank() == 0:
        stream = random_stream(engine.module)
        logger.warning(
            "checkpoint %s has no position of the random stream: stochastic rounding continues from "
            "micro-batch %d, with other numbers than an uninterrupted run; load the position yourself with "
            "megalowbit.random_stream(model).load_state_dict, if you have saved it",
            path,
            0 if stream is None else stream.step,
        )


def _of_this_rank(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Layer → state of its stream; where ranks differ, of this rank, or of the first one if it is new."""
    found, rank = {}, process_group.rank()
    for name, state in saved.items():
        states = state if isinstance(state, list) else [state]
        own = states[rank] if rank < len(states) else None
        found[name] = own or next(each for each in states if each)
    return found


def _of_all_ranks(streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Layer → state of its stream, or a list of one for each rank if they differ: layers draw seeds."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in streams for name in each):
        states = [each.get(name) for each in streams]
        present = [state for state in states if state is not None]
        merged[name] = present[0] if all(state == present[0] for state in present) else states
    return merged


def restore_scaler(engine: Any, own: Mapping[str, Any]) -> None:
    """Restore the engine's loss scaler; its state is the same at every ZeRO stage."""
    scaler, saved = engine.optimizer.grad_scaler, own.get("grad_scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)


def update_rule(engine: Any) -> str:
    """Name of the update rule, `AdamW` or `SGD`; all implementations of a rule have the same name."""
    inner = engine.optimizer.optimizer
    name = type(inner).__name__
    if name not in ADAMS:
        return name
    is_decoupled = inner.param_groups[0].get(
        "decoupled_weight_decay", getattr(inner, "adam_w_mode", name == "AdamW")
    )
    return "AdamW" if is_decoupled else "Adam"


def recipes_of(engine: Any) -> str:
    """Names of the recipes of this rank's layers."""
    layers = [module for module in engine.module.modules() if isinstance(module, BitLinear)]
    return ", ".join(sorted({layer.recipe.name for layer in layers})) or "none"


def has_power_of_two_scales(engine: Any) -> bool:
    """Whether any layer of this rank rounds tensor scales to powers of two."""
    layers = (module for module in engine.module.modules() if isinstance(module, BitLinear))
    return any(layer.recipe.has_power_of_two_scales for layer in layers)


def remove_checkpoint(path: Path) -> None:
    """Rename a checkpoint and remove it, so an interrupted removal does not look like a checkpoint."""
    try:
        remove_folder(path)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", path, error)


def _load_as_saved(engine: Any, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Load with DeepSpeed's loader into an engine of the saved layout."""
    if engine.zero_optimization_stage() < 3:
        return succeed_together(_load_with_deepspeed, engine, path, options)
    if not restores_states(options):
        raise UserError(
            f"{', '.join(options)}: ZeRO 3 stores its weights in the optimizer's files only; load all of "
            f"{path}, or export it and start from the export"
        )
    # loading is collective, so everything that can fail on one rank alone comes first
    parent, tag = str(path.parent), path.name
    files = [engine._get_ckpt_name(parent, tag), engine._get_zero_ckpt_name(parent, tag)]
    reader = engine.checkpoint_engine
    succeed_together(reader.read_ahead, files)
    try:
        return _load_with_deepspeed(engine, path, options)
    finally:
        reader.forget()


def _load_with_deepspeed(engine: Any, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    load = type(engine).load_checkpoint  # the engine object's method is replaced and would call this function
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
    if engine.zero_optimization_stage() == 0 and not restores_states(options):
        engine.optimizer.reload_model_params()  # otherwise the next step would undo the load
    return dict(state)


def _check_update_rule(path: Path, own: Mapping[str, Any], engine: Any) -> None:
    saved, present = own.get("optimizer"), update_rule(engine)
    if saved not in (None, present):
        raise UserError(
            f"checkpoint {path} has the state of optimizer {saved}, but the engine has {present}: "
            f"use {saved}, or start from its weights"
        )


def _engine_state(
    engine: Any, step: int, client_state: Mapping[str, Any], rank_file: tuple[str, Any] | None
) -> dict[str, Any]:
    with failing_together():  # before any rank waits for the others' random states
        scaler = engine.optimizer.grad_scaler
        own: dict[str, Any] = {
            "format": 1,
            "step": step,
            "client_keys": list(dict(client_state)),
            "random_states": packed_random_state(engine.device),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": update_rule(engine),
            "recipe": recipes_of(engine),
            "cpu_gemm": cpu_gemm() if engine.device.type == "cpu" else None,
        }
        stream = random_stream(engine.module)
        local = (
            None if rank_file is None else rank_file[0],
            None if stream is None else stream.state_dict(),
            None if has_one_stream(engine.module) else stream_states(engine.module),
        )
    states = gather_bytes(own["random_states"])
    rank_files, streams, of_layers = zip(*gather(local), strict=True)
    if any(each is not None for each in of_layers):  # as few models have
        own["random_streams"] = _of_all_ranks([each or {} for each in of_layers])
    return {
        **own,
        "random_states": states,
        # equal on all ranks; None on a stage of a pipeline without low-bit layers
        "random_stream": next((each for each in streams if each is not None), None),
        RANK_FILES_KEY: [name for name in rank_files if name is not None],
        LAYOUT_KEY: describe_layout(engine).to_dict(),
    }
