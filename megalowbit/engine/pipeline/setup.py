"""Pipeline parallelism: splits a Hugging Face model into stages and adapts DeepSpeed's pipeline engine.

DeepSpeed first sums `weight.grad` over the copies of a tied weight, then averages over data-parallel ranks.
Our gradients are in `main_grad`, and the copies of a tied embedding must stay bit-identical. Therefore the
sum over
copies comes *after* the average: a sum of two numbers has the same bits in either order, a sum of many has
not. At ZeRO stage 1, whose pieces differ by stage, both happen before DeepSpeed's reduction.
Not covered: ZeRO 2 and 3, tensor parallelism inside stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.config.pipeline import BEST, check_pipeline, interval_of
from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import share
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.distributed.process_grid import PIPELINE_KEY, ProcessGrid
from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.engine.pipeline.batch_reader import BatchReader
from megalowbit.engine.process_start import import_deepspeed, start_process_group
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, plain_state_dict
from megalowbit.values import is_count, require_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megalowbit.engine.pipeline.stage import PipelinedModel


def pipeline_module(
    model: PreTrainedModel,
    *,
    num_stages: int,
    partition: str = "parameters",
    activation_checkpoint_interval: int = 0,
    dynamic_shape: bool = True,
) -> PipelinedModel:
    """This process's stage of a Hugging Face model; every rank must pass the same model.

        module = mlb.pipeline_module(model, num_stages=2)
        engine, *_ = mlb.initialize(model=module, config="ds.json")
        loss = engine.train_batch(batches)  # an iterator over micro-batches, as mappings or (inputs, labels)

    The stage takes the model's modules, so drop the model afterwards: it is no longer complete.

    Args:
        model: a transformers model on the CPU; already converted, or converted later by `initialize`.
        num_stages: must divide the number of processes; the quotient is the data-parallel size.
        partition: what stages have in about equal numbers: `"parameters"`; `"uniform"`: parts (embedding,
            blocks, head); `"type:block"`: blocks.
        activation_checkpoint_interval: number of blocks whose activations are recomputed together; 0: none.
        dynamic_shape: whether shapes of micro-batches may differ; False saves a small message for each.

    Raises:
        UserError: the stages do not fit the model or the processes, or the model's family is unknown.
    """
    require_module(model, "pipeline_module")
    refuse_sharded_model("pipeline_module", model, "leave out fully_shard")
    start_process_group()
    import_deepspeed()
    from megalowbit.engine.pipeline.stage import PipelinedModel

    for name, value, least in (
        ("num_stages", num_stages, 1),
        ("activation_checkpoint_interval", activation_checkpoint_interval, 0),
    ):
        if not is_count(value, least=least):
            raise UserError(f"{name} = {value!r} must be a whole number ≥ {least}")
    ProcessGrid(process_group.rank(), process_group.world_size(), pipeline_size=num_stages)
    return PipelinedModel(
        model,
        num_stages=num_stages,
        partition=partition,
        interval=activation_checkpoint_interval,
        is_dynamic=dynamic_shape,
    )


def stage_of(model: torch.nn.Module) -> PipelinedModel | None:
    """The model, if `pipeline_module` made it; None for an ordinary model.

    Raises:
        UserError: it is another kind of pipeline.
    """
    from deepspeed.pipe import PipelineModule

    if not isinstance(model, PipelineModule):
        return None
    from megalowbit.engine.pipeline.stage import PipelinedModel

    if not isinstance(model, PipelinedModel):
        raise UserError(
            f"model is a custom {type(model).__name__}, whose parameter names and tied weights are unknown: "
            "pass mlb.pipeline_module(model, num_stages=…) of a Hugging Face model"
        )
    return model


def check_stages(model: torch.nn.Module, parts: DeepSpeedConfigParts, grid: ProcessGrid) -> None:
    """Reject a model without the configured stages, and settings that do not work with stages."""
    if stage_of(model) is None and grid.pipeline_size > 1:
        raise UserError(
            f"{PIPELINE_KEY} = {grid.pipeline_size}, but the model has no stages: pass "
            f"mlb.pipeline_module(model, num_stages={grid.pipeline_size})"
        )
    check_pipeline(parts.deepspeed, parts.settings, grid.pipeline_size)


def check_block(model: torch.nn.Module, block: Mapping[str, Any] | None) -> None:
    """Reject a configuration that contradicts the arguments of `pipeline_module`.

    `block` holds the keys of `pipeline` that the user has set. Recomputation may be set in either place.
    """
    stage = stage_of(model)
    if stage is None or not block:
        return
    interval = stage.activation_checkpoint_interval
    truth = {
        "stages": stage.num_stages,
        "partition": "parameters" if stage.partition == BEST else stage.partition,
    }
    if interval:
        truth["activation_checkpoint_interval"] = interval
    for key, value in truth.items():
        said = block.get(key, value)
        if ("parameters" if said == BEST else said) != value:
            argument = "num_stages" if key == "stages" else key
            raise UserError(
                f"pipeline.{key} = {said!r}, but pipeline_module was called with {argument} = {value!r}: "
                "use the same value, or leave the key out"
            )


def full_model_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model whose layers are converted: for a stage, the full model."""
    stage = stage_of(model)
    return model if stage is None or stage.full_model is None else stage.full_model


def begin_stage(model: torch.nn.Module, parts: DeepSpeedConfigParts) -> None:
    """Prepare a stage after the full model was converted; does nothing for other models.

    Raises:
        UserError: activations are recomputed, but a recipe's splits would differ in the recomputation.
    """
    stage = stage_of(model)
    if stage is None:
        return
    stage.follow_stream()
    interval = interval_of(parts.deepspeed)
    if not max(interval, stage.activation_checkpoint_interval):
        return
    for name, layer in bit_layers(stage).items():
        for role in ("input", "weight"):
            if getattr(layer.recipe, f"split_{role}") is not None:
                raise UserError(
                    f"pipeline.activation_checkpoint_interval = {interval} cannot be used with split_{role} "
                    f"in the recipe (layer {name}): later micro-batches have moved its directions on before "
                    "an earlier one is recomputed; set it to 0"
                )


def groups_of(model: torch.nn.Module) -> GroupsOfRank | None:
    """Process groups of a stage; None for other models."""
    stage = stage_of(model)
    return None if stage is None else stage.groups()


def attach_pipeline(engine: Any) -> None:
    """Make a pipeline engine read and check each step's batches first, and sum tied gradients in `main_grad`.

    Does nothing for engines of other models.
    """
    if stage_of(engine.module) is None:
        return
    from deepspeed.runtime.pipe import schedule

    BatchReader(engine)
    engine.optimizer.gradients.later_stages = engine.module.num_stages - 1 - engine.module.stage_id
    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _wait_for_the_average,
        schedule.ReduceGrads: _reduce_gradients,
    }


def release_full_model(module: torch.nn.Module) -> None:
    """Release the other stages' modules; does nothing for other models."""
    stage = stage_of(module)
    if stage is not None:
        stage.release()


def gather_weights(module: PipelinedModel) -> dict[str, torch.Tensor] | None:
    """The full model's weights, as after `restore`, on the CPU of rank 0; None on other ranks.

    Every rank must call it.
    """
    rank, device = process_group.rank(), next(module.parameters()).device
    own = plain_state_dict(module)
    full = dict(own)
    for stage in range(1, module.num_stages):
        sender = module._topo.get_rank(pipe=stage, data=0)
        shapes = share({name: (value.shape, value.dtype) for name, value in own.items()}, sender)
        for name, (shape, dtype) in shapes.items():
            if rank == sender:
                collectives.send(own[name].to(device).contiguous(), dst=0)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                collectives.recv(received, src=sender)
                full[name] = received.cpu()
    return full if rank == 0 else None


def _wait_for_the_average(engine: Any) -> None:
    """Replaces DeepSpeed's reduction of tied gradients, which would come before the average."""


def _reduce_gradients(engine: Any) -> None:
    """Average over data parallel as DeepSpeed does, then sum over the copies of a tied weight."""
    tied = [each for each in engine.module.get_tied_weights_and_groups() if each[0].requires_grad]
    if engine.zero_optimization_stage():
        for weight, group in tied:
            _sum_before_partition(engine, weight, group)
    engine._exec_reduce_grads()
    if not engine.zero_optimization_stage():
        for weight, group in tied:
            collectives.all_reduce(weight.main_grad, group=group)


def _sum_before_partition(engine: Any, weight: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    """Average a tied weight's gradient, then sum it over the copies, before ZeRO partitions it.

    ZeRO's pieces differ by stage. DeepSpeed's later average is over equal numbers, so it changes nothing.
    """
    gradient = engine.optimizer.get_gradient_for_reduction(weight)
    peers = engine.module.groups().data
    ranks = process_group.world_size(peers)
    if ranks > 1:
        collectives.all_reduce(gradient, group=peers)
        gradient.div_(ranks)
    collectives.all_reduce(gradient, group=group)
