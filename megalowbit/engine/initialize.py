"""`megalowbit.initialize`: the counterpart of `deepspeed.initialize`.

DeepSpeed gets a configuration without precision blocks and a callable that builds our optimizer after the
model has been moved and broadcast in fp32; so masters are the exact initial weights, on every rank the same.
Parameters are cast to half precision then, but for norms kept in fp32; buffers keep their type. If the
configuration names a recipe that quantises, the model leaves here with low-bit layers or not at all. From
ZeRO stage 1 on DeepSpeed's own optimizer is made ours, and exact masters are written afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts, load_json, read_deepspeed_config
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.pipeline import set_by_user
from megalowbit.config.zero import zero_stage
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.mpu import GroupsOfRank, adapt_mpu, find_grid
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.build_optimizer import OptimizerStart
from megalowbit.engine.checkpoints.methods import attach_checkpoint_methods
from megalowbit.engine.model_optimizer import ClientOptimizer, ModelParameters
from megalowbit.engine.parameters.layout import lay_out_parameters
from megalowbit.engine.parameters.user_gradients import attach_zero_grad
from megalowbit.engine.pipeline.setup import attach_pipeline, check_block, check_stages, release_whole
from megalowbit.engine.prepare_model import check_prepared, prepare_model
from megalowbit.engine.process_start import import_deepspeed, start_process_group
from megalowbit.engine.run_checks.deepspeed_arguments import (
    Config,
    check_scalars,
    find_config,
    hidden_size_of,
    require_model,
    set_default_port,
    set_local_rank,
)
from megalowbit.engine.run_checks.deepspeed_blocks import QUIET, check_parts
from megalowbit.engine.run_checks.model import check_arguments
from megalowbit.engine.run_checks.ranks_agree import (
    check_ranks_agree,
    configuration_facts,
    installation_facts,
    model_facts,
)
from megalowbit.engine.tensor_parallel.same_batch import check_first_batch
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.optim.precision.autocast import attach_autocast
from megalowbit.supervision.timeouts import set_group_timeouts

logger = logging.getLogger(__name__)

Scheduler = Any  # torch's LRScheduler or DeepSpeed's look-alikes


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    *,
    seed: int = 0,
    total_steps: int | None = None,
    timeout: timedelta | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine that trains `model` with our layers and optimizer; every rank must call it.

    The first thirteen arguments are those of `deepspeed.initialize`, in its order.

    Args:
        args: whose `deepspeed_config` is used where `config` is not given; its `local_rank` is set.
        model: required: fp32, or already in the configured precision; converted and cast in place.
        optimizer: instead of the configuration's; a torch optimizer over the model's parameters, or what
            makes one from `model_parameters` (by default all), called once layers are cut and converted.
        model_parameters: parameters or groups to train, used as they are; by default all, with weight decay
            as `weight_decay_groups` applies it: to matrices, and of split weights to `weight` and `split_s`.
        training_data: dataset from which a data loader is made.
        lr_scheduler: callable from optimizer to scheduler, or a scheduler of the `optimizer` passed; by
            default the configuration's.
        distributed_port: of the main process, where the environment names none.
        mpu: model-parallel unit, such as Megatron's `parallel_state`; norm and overflow are reduced over its
            model-parallel group.
        dist_init_required: as for `deepspeed.initialize`.
        collate_fn: for the data loader.
        config: required: DeepSpeed configuration with a `"megalowbit"` block: a file, its content, or read
            already. What it schedules is up to the caller, and a warning says so unless it was read already.
        mesh_param: refused: for sequence parallelism, which is not supported.
        config_params: an older name of `config`.
        seed: of stochastic rounding in layers that are converted here.
        total_steps: optimizer steps of the run, for `"auto"` in the schedule.
        timeout: after which a collective that does not end fails; by default torch's own until the engine is
            made, and `megalowbit.watchdog.timeout` from then on.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`; dataloader and scheduler may be None.
        `engine.regularizer` is the dual-range regulariser at work, or None; `engine.process_grid` says where
        this process stands.

    Raises:
        UserError: configuration, model and arguments do not fit together, or ranks were started differently.
    """
    model, config = require_model(model, args), find_config(config, args, config_params)
    check_scalars(
        seed=seed,
        total_steps=total_steps,
        timeout=timeout,
        mesh_param=mesh_param,
        distributed_port=distributed_port,
    )
    set_default_port(distributed_port)
    identity = start_process_group(timeout=timeout, dist_init_required=dist_init_required)
    set_local_rank(args, identity.local_rank)
    deepspeed = import_deepspeed()
    _forget_earlier_unit()
    unit = succeed_together(adapt_mpu, mpu)
    parts, grid = succeed_together(_read, config, model, unit, total_steps, optimizer)
    _check_ranks_agree(parts, grid, model, optimizer, seed, unit)
    if unit is None:  # the same on all ranks from here on
        succeed_together(check_stages, model, parts, grid)
    succeed_together(check_parts, parts)
    succeed_together(check_arguments, model, parts.settings, optimizer, model_parameters, lr_scheduler)
    succeed_together(lay_out_parameters, model, stage=zero_stage(parts.deepspeed))
    prepared = prepare_model(model, parts, grid, mpu=unit, seed=seed)
    if parts is not config:  # the pretraining loop, which keeps to schedules, has read it already
        _warn_of_guesses(parts)
        _warn_of_schedules(parts, prepared.recipe)
    start = OptimizerStart(
        model, parts, groups=prepared.groups, optimizer=optimizer, model_parameters=model_parameters
    )
    engine, wrapped, dataloader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=start,
        training_data=training_data,
        lr_scheduler=start.schedule(lr_scheduler),
        mpu=prepared.mpu,
        dist_init_required=False,
        collate_fn=collate_fn,
        config={**QUIET, **parts.deepspeed, **start.deepspeed_keys},
    )
    start.finish(engine)
    _attach(engine, parts.settings, start.regularizer, grid)
    succeed_together(check_prepared, engine, prepared)
    release_whole(engine.module)
    _limit_collectives(timeout, parts.settings.watchdog.timeout)
    return engine, wrapped, dataloader, scheduler


def _read(
    config: Config,
    model: torch.nn.Module,
    mpu: GroupsOfRank | None,
    total_steps: int | None,
    optimizer: object,
) -> tuple[DeepSpeedConfigParts, ProcessGrid]:
    """The configuration, unless it was read already, and where it places this process."""
    from deepspeed.pipe import PipelineModule

    stages = int(model.num_stages) if isinstance(model, PipelineModule) else None
    if isinstance(config, DeepSpeedConfigParts):
        check_block(model, set_by_user(config.deepspeed))
        return config, find_grid(config.deepspeed, stages=stages, mpu=mpu)
    raw = config if isinstance(config, dict) else load_json(config)
    grid = find_grid(raw, stages=stages, mpu=mpu)
    parts = read_deepspeed_config(
        raw,
        world_size=grid.data_size,
        total_steps=total_steps,
        has_optimizer=optimizer is not None,
        hidden_size=hidden_size_of(model),
    )
    check_block(model, raw.get("pipeline"))
    return parts, grid


def _check_ranks_agree(
    parts: DeepSpeedConfigParts,
    grid: ProcessGrid,
    model: torch.nn.Module,
    optimizer: object,
    seed: int,
    mpu: object,
) -> None:
    everywhere = {
        **installation_facts(),
        **configuration_facts(parts),
        "seed": str(seed),
        "argument optimizer": type(optimizer).__name__,
        "argument mpu": type(mpu).__name__,
        "argument model": type(model).__name__,
    }
    check_ranks_agree(everywhere, of_this_part=model_facts(model), grid=grid)


def _forget_earlier_unit() -> None:
    """Let no engine ask the groups of one before it, which DeepSpeed keeps for the whole process."""
    from deepspeed.utils import groups

    groups.mpu = None


def _attach(
    engine: Any, settings: EngineSettings, regularizer: DualRangeRegularizer | None, grid: ProcessGrid
) -> None:
    """Put into the engine what DeepSpeed has no argument for."""
    from megalowbit.engine.checkpoints.checkpoint_engine import AtomicCheckpointEngine  # imports deepspeed

    engine.clip_fp32_gradients = _leave_clipping_to_the_optimizer
    engine.checkpoint_engine = AtomicCheckpointEngine(engine)
    attach_zero_grad(engine)
    engine.regularizer = regularizer
    engine.process_grid = grid
    attach_pipeline(engine)
    check_first_batch(engine)
    attach_checkpoint_methods(engine)
    if settings.autocast.enabled:
        # hooks of the module, and not the engine's forward: evaluation and recomputation take the same casts
        classes = settings.autocast.op_classes()
        attach_autocast(engine.module, settings.precision, engine.device.type, classes)


def _leave_clipping_to_the_optimizer() -> None:
    """Take the place of the engine's own clipping, which would come before S is divided out."""


def _limit_collectives(timeout: timedelta | None, configured: float | None) -> None:
    """Set the timeout of all groups, those included that DeepSpeed has made without one."""
    if timeout is None and configured is not None:
        timeout = timedelta(seconds=configured)
    if timeout is not None:
        set_group_timeouts(timeout)


def _warn_of_guesses(parts: DeepSpeedConfigParts) -> None:
    if parts.guesses and process_group.rank() == 0:
        logger.warning(
            '"auto" is filled in where no TrainingArguments say more: %s; write the values that you mean',
            ", ".join(parts.guesses),
        )


def _warn_of_schedules(parts: DeepSpeedConfigParts, recipe: Recipe | None) -> None:
    """Say what a loop of the user's own has to do itself, on one rank."""
    if process_group.rank() != 0:
        return
    if parts.megalowbit.get("late_switch") is not None:
        logger.warning(
            "megalowbit.late_switch is acted on by launch/pretrain.py only: "
            "call mlb.switch_precision(model) yourself"
        )
    if parts.megalowbit.get("speculation") is not None:
        logger.warning(
            "megalowbit.speculation is acted on by launch/pretrain.py only: "
            "make an mlb.PrecisionController(model, settings) yourself"
        )
    if recipe is not None and recipe.parameter_split is not None:
        logger.warning("recipe.parameter_split: call mlb.split_weights(engine) before the steps that are due")
