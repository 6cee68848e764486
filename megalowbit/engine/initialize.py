"""`megalowbit.initialize`: the counterpart of `deepspeed.initialize`.

DeepSpeed gets a configuration without precision blocks and a callable that builds our optimizer after the
model has been moved and broadcast in fp32; so masters are the exact initial weights, on every rank the same.
Parameters are cast to half precision then, but for norms kept in fp32; buffers keep their type. If the
configuration names a recipe that quantises, the model leaves here with low-bit layers or not at all. From
ZeRO stage 1 on DeepSpeed's own optimizer is made ours, and exact masters are written afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megalowbit import process_group
from megalowbit.engine.agreement import succeed_together
from megalowbit.engine.argument_checks import check_arguments
from megalowbit.engine.batch_size import MICRO, STEPS, TRAIN
from megalowbit.engine.config import DeepSpeedConfigParts, EngineSettings, load_json, read_deepspeed_config
from megalowbit.engine.model_optimizer import ModelParameters, parameter_groups, wrap_optimizer
from megalowbit.engine.mpu import ModelParallelUnit, adapt_mpu, find_grid
from megalowbit.engine.optimizer_settings import build_optimizer
from megalowbit.engine.pipeline import (
    attach_pipeline,
    begin_stage,
    check_stages,
    groups_of,
    has_low_bit_layers_elsewhere,
    release_whole,
    whole_of,
)
from megalowbit.engine.process_grid import ProcessGrid
from megalowbit.engine.process_start import import_deepspeed, start_process_group
from megalowbit.engine.run_checks import (
    check_layers_kept,
    check_ranks_agree,
    check_scaler,
    configuration_facts,
    installation_facts,
    low_bit_names,
    model_facts,
)
from megalowbit.engine.tensor_parallel import shard_model
from megalowbit.engine.zero_start import ZERO_KEYS, ZeroStart, zero_stage
from megalowbit.errors import UserError
from megalowbit.layers.regularizer import DualRangeRegularizer, build_regularizer
from megalowbit.optim.autocast import attach_autocast
from megalowbit.optim.fp32_modules import keep_fp32

logger = logging.getLogger(__name__)

# DeepSpeed's throughput timer waits for the device twice a step, for a figure that telemetry has already.
QUIET = {"log_level": "warning", "timers": {"throughput": {"enabled": False}}}
Scheduler = Any  # torch's LRScheduler or DeepSpeed's look-alikes


def initialize(
    *,
    model: torch.nn.Module,
    config: str | Path | dict[str, Any] | DeepSpeedConfigParts,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    total_steps: int | None = None,
    timeout: timedelta | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine that trains `model` with our layers and optimizer; every rank must call it.

    Args:
        model: fp32, or already in the configured precision; converted and cast in place.
        config: DeepSpeed configuration with a `"megalowbit"` block: a file, its content, or read already.
            What it schedules is up to the caller, and a warning says so unless it was read already.
        optimizer: a torch optimizer over the model's parameters, instead of the configuration's.
        model_parameters: parameters or groups to train, used as they are; by default all, with weight decay
            as `weight_decay_groups` applies it: to matrices, and of split weights to `weight` and `split_s`.
        training_data: dataset from which a data loader is made.
        lr_scheduler: callable from optimizer to scheduler, or a scheduler of the `optimizer` passed; by
            default the configuration's.
        mpu: model-parallel unit, such as Megatron's `parallel_state`; norm and overflow are reduced over its
            model-parallel group.
        dist_init_required: as for `deepspeed.initialize`.
        collate_fn: for the data loader.
        seed: of stochastic rounding in layers that are converted here.
        total_steps: optimizer steps of the run, for `"auto"` in the scheduler.
        timeout: after which a collective that does not end fails.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`; dataloader and scheduler may be None.
        `engine.regularizer` is the dual-range regulariser at work, or None; `engine.process_grid` says where
        this process stands.

    Raises:
        UserError: configuration, model and arguments do not fit together, or ranks were started differently.
    """
    start_process_group(timeout=timeout, dist_init_required=dist_init_required)
    deepspeed = import_deepspeed()
    mpu_given = mpu
    mpu = succeed_together(lambda: adapt_mpu(mpu_given))
    parts, grid = succeed_together(lambda: _read(config, model, mpu, total_steps, optimizer))
    _check_ranks_agree(parts, grid, model, optimizer, seed, mpu)
    if mpu is None:  # on all ranks alike from here on
        succeed_together(lambda: check_stages(model, parts, grid))
    deepspeed_config = {**QUIET, **parts.deepspeed}
    check_nested_blocks(parts)
    check_arguments(model, parts.settings, optimizer, model_parameters, lr_scheduler)
    mpu = shard_model(model, parts) or mpu
    recipe = _convert_if_asked(whole_of(model), parts.settings.recipe, seed)
    begin_stage(model, parts)
    if parts is not config:  # the pretraining loop, which keeps to schedules, has read it already
        _warn_of_schedules(parts, recipe)
    _draw_own_numbers(model, grid)
    converted = low_bit_names(model)
    if parts.settings.fp32_norms:
        keep_fp32(model)  # before anything asks which parameters have masters
    if optimizer is not None:
        groups = optimizer.param_groups
    else:
        groups = parameter_groups(model, model_parameters, deepspeed_config)
    trained = [parameter for each in groups for parameter in each["params"]]
    regularizer = build_regularizer(model, parts.settings.regularizer, trained)

    zero = None
    if zero_stage(deepspeed_config):
        deepspeed_config |= ZERO_KEYS
        zero = ZeroStart(model, parts, mpu=groups_of(model) or mpu, regularizer=regularizer)

    def make_optimizer(_: object) -> torch.optim.Optimizer:
        inner = optimizer or build_optimizer(deepspeed_config["optimizer"], groups)
        if zero is not None:
            return zero.inner(inner)
        return wrap_optimizer(inner, model, parts, mpu=groups_of(model) or mpu, regularizer=regularizer)

    engine, wrapped, dataloader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=False,
        collate_fn=collate_fn,
        config=deepspeed_config,
    )
    if zero is not None:
        zero.finish(engine)
    _finish(engine, parts.settings, regularizer, grid)
    succeed_together(lambda: _check_engine(engine, recipe, converted))
    release_whole(engine.module)
    return engine, wrapped, dataloader, scheduler


def _finish(
    engine: Any, settings: EngineSettings, regularizer: DualRangeRegularizer | None, grid: ProcessGrid
) -> None:
    """Put into the engine what DeepSpeed has no argument for."""
    from megalowbit.engine.checkpoint_engine import AtomicCheckpointEngine

    engine.clip_fp32_gradients = _leave_clipping_to_the_optimizer
    engine.checkpoint_engine = AtomicCheckpointEngine(engine)
    engine.regularizer = regularizer
    engine.process_grid = grid
    attach_pipeline(engine)
    if settings.autocast.enabled:
        # hooks of the module, and not the engine's forward: evaluation and recomputation take the same casts
        classes = settings.autocast.op_classes()
        attach_autocast(engine.module, settings.precision, engine.device.type, classes)


def _read(
    config: str | Path | dict[str, Any] | DeepSpeedConfigParts,
    model: torch.nn.Module,
    mpu: ModelParallelUnit | None,
    total_steps: int | None,
    optimizer: object,
) -> tuple[DeepSpeedConfigParts, ProcessGrid]:
    if isinstance(config, DeepSpeedConfigParts):
        return config, find_grid(config.deepspeed, model=model, mpu=mpu)
    raw = config if isinstance(config, dict) else load_json(config)
    grid = find_grid(raw, model=model, mpu=mpu)
    parts = read_deepspeed_config(
        raw, world_size=grid.data_size, total_steps=total_steps, has_optimizer=optimizer is not None
    )
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


def _check_engine(engine: Any, recipe: Any, converted: Collection[str]) -> None:
    if recipe is not None and not has_low_bit_layers_elsewhere(engine.module):
        check_quantised(engine.module, recipe)
    check_layers_kept(engine.module, converted)
    check_scaler(engine)


class _DataParallelSize:
    """The one thing that `DeepSpeedConfig` asks of an mpu."""

    def __init__(self, parts: DeepSpeedConfigParts) -> None:
        train, micro, steps = (parts.deepspeed[key] for key in (TRAIN, MICRO, STEPS))
        self.size = train // (micro * steps)

    def get_data_parallel_world_size(self) -> int:
        return self.size


def check_nested_blocks(parts: DeepSpeedConfigParts) -> None:
    """Let DeepSpeed's own models read the configuration; needs a process group.

    Raises:
        UserError: their first finding, as one line.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig({**QUIET, **parts.deepspeed}, _DataParallelSize(parts))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        # DeepSpeed validates block by block and does not say which block it is in.
        blocks = [
            name
            for name, block in parts.deepspeed.items()
            if isinstance(block, dict) and path and path[0] in block
        ]
        key = ".".join([*blocks, *path] if len(blocks) == 1 else path) or error.title
        raise UserError(
            f"DeepSpeed rejects {key} = {first['input']!r} ({first['msg']}): "
            "correct it as DeepSpeed documents it, or remove it"
        ) from None
    except (AssertionError, ValueError, TypeError, DeepSpeedConfigError) as error:
        raise UserError(f"DeepSpeed rejects the configuration: {error}") from None


def _convert_if_asked(model: torch.nn.Module, setting: str | dict[str, Any] | None, seed: int) -> Any:
    """Swap layers if the recipe quantises and nothing is swapped yet; returns the recipe, or None."""
    if setting is None:
        return None
    from megalowbit.layers.recipe import recipe as recipe_of
    from megalowbit.layers.surgery import bit_layers, convert

    recipe = recipe_of(setting)
    layers = bit_layers(model)
    for name, layer in layers.items():
        if layer.recipe != recipe:
            raise UserError(
                f"megalowbit.recipe is {recipe.name!r} but layer {name} was converted with "
                f"{layer.recipe.name!r}: convert the model with the recipe of the configuration"
            )
    if recipe.quantizes and not layers:
        report = convert(model, recipe, seed=seed, rank=process_group.rank())
        if process_group.rank() == 0:
            logger.info("%s", report)
    return recipe


def _warn_of_schedules(parts: DeepSpeedConfigParts, recipe: Any) -> None:
    """Say what a loop of the user's own has to do itself, on one rank."""
    if process_group.rank() != 0:
        return
    if parts.megalowbit.get("late_switch") is not None:
        logger.warning(
            "megalowbit.late_switch is acted on by launch/pretrain.py only: "
            "call mlb.switch_precision(model) yourself"
        )
    if recipe is not None and recipe.parameter_split is not None:
        logger.warning("recipe.parameter_split: call mlb.split_weights(engine) before the steps that are due")


def _draw_own_numbers(model: torch.nn.Module, grid: ProcessGrid) -> None:
    """Let every data-parallel rank round its own data with its own random numbers."""
    from megalowbit.layers.surgery import random_stream

    stream = random_stream(model)
    if stream is not None:
        stream.rank = grid.data_rank


def check_quantised(module: torch.nn.Module, recipe: Any) -> None:
    """Make sure that a run which asks for low-bit layers has some.

    Raises:
        UserError: `recipe` quantises, and `module` holds no low-bit layer.
    """
    if recipe is None or not recipe.quantizes:
        return
    from megalowbit.layers.surgery import bit_layers

    if not bit_layers(module):
        raise UserError(
            f"megalowbit.recipe = {recipe.name!r} asks for low-bit layers but the model has none: "
            'use recipe "bf16", or a model with projections the recipe does not keep'
        )


def _leave_clipping_to_the_optimizer() -> None:
    """Take the place of the engine's own clipping, which fails without `.grad`."""
