"""`megalowbit.initialize`: the counterpart of `deepspeed.initialize`.

DeepSpeed gets a configuration without precision blocks, and a callable that builds our optimizer after the
model has been moved and broadcast in fp32. The masters are therefore the exact initial weights, the same on
every rank. Then parameters are cast to half precision, except norms kept in fp32; buffers keep their dtype.
If the configured recipe quantises, the returned model has low-bit layers; otherwise an error is raised. From
ZeRO stage 1 on, DeepSpeed's optimizer gets our class after it is built, and exact masters are written last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts, load_json, read_deepspeed_config
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.pipeline import set_by_user
from megalowbit.config.zero import zero_stage
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import agree, succeed_together
from megalowbit.distributed.mpu import GroupsOfRank, adapt_mpu, find_grid
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.engine.build_optimizer import OptimizerStart
from megalowbit.engine.checkpoints.methods import attach_checkpoint_methods
from megalowbit.engine.model_optimizer import HALF, ClientOptimizer, ModelParameters
from megalowbit.engine.parameters.initial_weights import InitialWeights, check_weights, copy_value
from megalowbit.engine.parameters.layout import make_parameters_contiguous
from megalowbit.engine.parameters.user_gradients import attach_direct_backward, attach_zero_grad
from megalowbit.engine.pipeline.setup import (
    attach_pipeline,
    check_block,
    check_stages,
    full_model_of,
    release_full_model,
    stage_of,
)
from megalowbit.engine.prepare_model import check_prepared, prepare_model
from megalowbit.engine.process_start import import_deepspeed, start_process_group
from megalowbit.engine.run_checks.deepspeed_arguments import (
    Config,
    check_scalars,
    check_training_data,
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
from megalowbit.hf.start.weights import StartWeights
from megalowbit.layers.cpu_gemm import cpu_gemm, let_torch_follow, use_cpu_gemm
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.optim.precision.autocast import attach_autocast
from megalowbit.supervision.timeouts import set_group_timeouts

logger = logging.getLogger(__name__)

Scheduler = Any  # torch's LRScheduler, or one of DeepSpeed's, which have the same methods


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
    weights: StartWeights | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine that trains `model` with our layers and optimizer; every rank must call it.

    The first thirteen arguments are those of `deepspeed.initialize`, in its order.

    Args:
        args: its `deepspeed_config` is used if `config` is not given; its `local_rank` is set.
        model: required; fp32, or already in the configured precision. It is converted and cast in place.
        optimizer: replaces the configured one. A torch optimizer over the model's parameters, or a callable
            that creates one from `model_parameters` (by default all) after sharding and conversion.
        model_parameters: parameters or groups to train, used unchanged. By default all, with the weight decay
            of `weight_decay_groups`: on matrices and, of split weights, on `weight` and `split_s`.
        training_data: dataset for the returned data loader.
        lr_scheduler: callable from optimizer to scheduler, or a scheduler of the `optimizer` passed; by
            default the configured one.
        distributed_port: port of the main process if the environment sets none.
        mpu: model-parallel unit, such as Megatron's `parallel_state`. Norm and overflow are reduced over its
            model-parallel group.
        dist_init_required: as for `deepspeed.initialize`.
        collate_fn: for the data loader.
        config: required; DeepSpeed configuration with a `"megalowbit"` block: a file, a dict, or
            `DeepSpeedConfigParts`. The caller must act on what it schedules (late switch, speculation,
            parameter split); a warning says so, unless `DeepSpeedConfigParts` is passed.
        mesh_param: rejected, because sequence parallelism is not supported.
        config_params: an older name of `config`.
        seed: seed of stochastic rounding in the layers converted here.
        total_steps: optimizer steps of the run, for `"auto"` in the schedule.
        timeout: a collective that takes longer fails. By default torch's timeout until the engine is built,
            and `megalowbit.watchdog.timeout` from then on.
        weights: of a model with parameters on the meta device, both from `hf.start.weights.start_model`. Rank
            0 reads them, one tensor at a time, and each rank keeps its part.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`; dataloader and scheduler may be None.
        `engine.regularizer` is the dual-range regulariser or None; `engine.process_grid` holds this process's
        place in the process grid.

    Raises:
        UserError: configuration, model and arguments do not fit together, or ranks were started differently.
    """
    model, config = require_model(model, args), find_config(config, args, config_params)
    refuse_sharded_model("initialize", model, "leave out fully_shard, because DeepSpeed shards it")
    check_scalars(
        seed=seed,
        total_steps=total_steps,
        timeout=timeout,
        mesh_param=mesh_param,
        distributed_port=distributed_port,
    )
    check_training_data(training_data)
    set_default_port(distributed_port)
    identity = start_process_group(timeout=timeout, dist_init_required=dist_init_required)
    set_local_rank(args, identity.local_rank)
    deepspeed = import_deepspeed()
    _forget_earlier_unit()
    unit = succeed_together(adapt_mpu, mpu)
    parts, grid = succeed_together(_read, config, model, unit, total_steps, optimizer)
    _check_ranks_agree(parts, grid, model, optimizer, seed, unit, weights)
    if unit is None:  # from here on the same on all ranks
        succeed_together(check_stages, model, parts, grid)
    succeed_together(check_parts, parts)
    succeed_together(check_arguments, model, parts.settings, optimizer, model_parameters, lr_scheduler)
    if weights is None:
        succeed_together(make_parameters_contiguous, model, stage=zero_stage(parts.deepspeed))
    else:
        succeed_together(check_weights, full_model_of(model), weights)
    prepared = prepare_model(model, parts, grid, mpu=unit, seed=seed)
    initial = None if weights is None else _allocate(model, parts, weights, identity)
    if parts is not config:  # the pretraining loop passes parts, and follows the schedules itself
        _warn_of_guesses(parts)
        _warn_of_schedules(parts, prepared.recipe)
    start = OptimizerStart(
        model,
        parts,
        groups=prepared.groups,
        optimizer=optimizer,
        model_parameters=model_parameters,
        initial=initial,
    )
    with nullcontext() if initial is None else initial.placed_by_engine():
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
    if parts is not config:
        _warn_of_first_rate(wrapped)
    if engine.device.type == "cpu":
        use_cpu_gemm(agree(cpu_gemm))
        if parts.settings.precision == "bf16":
            let_torch_follow()
    _attach(engine, parts.settings, start.regularizer, grid)
    succeed_together(check_prepared, engine, prepared)
    release_full_model(engine.module)
    _limit_collectives(timeout, parts.settings.watchdog.timeout)
    return engine, wrapped, dataloader, scheduler


def _read(
    config: Config,
    model: torch.nn.Module,
    mpu: GroupsOfRank | None,
    total_steps: int | None,
    optimizer: object,
) -> tuple[DeepSpeedConfigParts, ProcessGrid]:
    """The parsed configuration and the process grid."""
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
    weights: StartWeights | None,
) -> None:
    everywhere = {
        **installation_facts(),
        **configuration_facts(parts),
        "seed": str(seed),
        "argument optimizer": type(optimizer).__name__,
        "argument mpu": type(mpu).__name__,
        "argument model": type(model).__name__,
        "argument weights": type(weights).__name__,
        "weights.open": type(getattr(weights, "open", None)).__name__,
    }
    check_ranks_agree(everywhere, of_this_part=model_facts(model), grid=grid)


def _allocate(
    model: torch.nn.Module, parts: DeepSpeedConfigParts, weights: StartWeights, identity: ProcessIdentity
) -> InitialWeights:
    """Give a model on the meta device memory; at ZeRO 0 also its weights. Collective."""
    from deepspeed.accelerator import get_accelerator

    stage, pipeline_stage = zero_stage(parts.deepspeed), stage_of(model)
    initial = InitialWeights(
        model,
        weights,
        stage=stage,
        dtype=HALF.get(parts.settings.precision, torch.float32) if stage else torch.float32,
        device=torch.device(get_accelerator().device_name(identity.local_rank)),
        names={} if pipeline_stage is None else pipeline_stage.parameter_names(),
    )
    succeed_together(initial.allocate)
    succeed_together(make_parameters_contiguous, model, stage=stage)
    if not stage:
        initial.fill(copy_value)
    return initial


def _forget_earlier_unit() -> None:
    """Clear the mpu of an earlier engine, which DeepSpeed keeps in a module for the whole process."""
    from deepspeed.utils import groups

    groups.mpu = None


def _attach(
    engine: Any, settings: EngineSettings, regularizer: DualRangeRegularizer | None, grid: ProcessGrid
) -> None:
    """Set what `deepspeed.initialize` has no argument for."""
    from megalowbit.engine.checkpoints.checkpoint_engine import AtomicCheckpointEngine  # imports deepspeed

    engine.clip_fp32_gradients = _leave_clipping_to_the_optimizer
    engine.checkpoint_engine = AtomicCheckpointEngine(engine)
    attach_zero_grad(engine)
    attach_direct_backward(engine)
    engine.regularizer = regularizer
    engine.process_grid = grid
    if engine.training_dataloader is not None and not torch.accelerator.is_available():
        engine.training_dataloader.pin_memory = False  # torch would warn that there is nothing to pin it for
    attach_pipeline(engine)
    check_first_batch(engine)
    attach_checkpoint_methods(engine)
    if settings.autocast.enabled:
        # module hooks instead of the engine's forward, because evaluation and recomputation need the same
        # casts
        classes = settings.autocast.op_classes()
        attach_autocast(engine.module, settings.precision, engine.device.type, classes)


def _leave_clipping_to_the_optimizer() -> None:
    """Replaces the engine's clipping, which would clip before the gradients are divided by the loss scale."""


def _limit_collectives(timeout: timedelta | None, configured: float | None) -> None:
    """Set the timeout of all groups, including those that DeepSpeed created without one."""
    if timeout is None and configured is not None:
        timeout = timedelta(seconds=configured)
    if timeout is not None:
        set_group_timeouts(timeout)


def _warn_of_guesses(parts: DeepSpeedConfigParts) -> None:
    if parts.guesses and process_group.rank() == 0:
        logger.warning(
            '"auto" was replaced by defaults, because there are no TrainingArguments: %s; set these values',
            ", ".join(parts.guesses),
        )


def _warn_of_schedules(parts: DeepSpeedConfigParts, recipe: Recipe | None) -> None:
    """Warn, on one rank, about scheduled actions that the user's loop has to take."""
    if process_group.rank() != 0:
        return
    for key, remedy in (
        ("late_switch", "call mlb.switch_precision(model) in your training loop"),
        ("speculation", "create an mlb.PrecisionController(model, settings) in your training loop"),
        ("oscillation_reset", "leave it out"),
    ):
        if parts.megalowbit.get(key) is not None:
            logger.warning("megalowbit.%s is applied by launch/pretrain.py only: %s", key, remedy)
    if recipe is not None and recipe.parameter_split is not None:
        logger.warning("recipe.parameter_split: call mlb.split_weights(engine) before the steps that are due")


def _warn_of_first_rate(optimizer: Any) -> None:
    """Warn, on one rank, if the scheduler begins with a step that changes nothing."""
    if process_group.rank() == 0 and not any(group["lr"] for group in optimizer.param_groups):
        logger.warning(
            "the learning rate of the first step is 0, as in warm-ups of DeepSpeed and Transformers: with "
            "megalowbit.lr_schedule, the first step trains already (docs/schedules.md)"
        )
