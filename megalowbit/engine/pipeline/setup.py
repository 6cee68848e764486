"""Pipeline parallelism: cut a Hugging Face model into stages, and what DeepSpeed's engine must do for us.

DeepSpeed reduces `weight.grad` of tied weights, then averages over data parallel; our gradients are in
`main_grad`, and the copies of a tied embedding must stay bit-identical. So the sum over the copies comes
*after* the average: a sum of two numbers has the same bits in either order, one of many has not.
At ZeRO stage 1, which keeps pieces that differ by stage, both happen before DeepSpeed's reduction.
Not covered: ZeRO 2 and 3, tensor parallelism inside stages, models larger than the memory of a host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.config.pipeline import BEST, check_pipeline, interval_of
from megalowbit.distributed import process_group
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.distributed.process_grid import PIPELINE_KEY, ProcessGrid
from megalowbit.engine.pipeline.batch_reader import BatchReader
from megalowbit.engine.process_start import import_deepspeed, start_process_group
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, plain_state_dict
from megalowbit.values import is_count

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
    """Cut a Hugging Face model into stages and keep this process's; every rank must pass the same model.

        module = mlb.pipeline_module(model, num_stages=2)
        engine, *_ = mlb.initialize(model=module, config="ds.json")
        loss = engine.train_batch(batches)  # an iterator over micro-batches, as mappings or (inputs, labels)

    The model's modules are used as they are: drop it afterwards, it is no longer whole.

    Args:
        model: from transformers, on the CPU; converted, or left to `initialize` to convert.
        num_stages: divides the number of processes; the others are data-parallel.
        partition: `"parameters"`: stages with about as many parameters each; `"uniform"`: as many parts
            (embedding, blocks, head); `"type:block"`: as many blocks.
        activation_checkpoint_interval: blocks whose activations are recomputed together; 0: none are.
        dynamic_shape: whether shapes of micro-batches may differ; False saves a small message for each.

    Raises:
        UserError: the stages do not fit model or processes, or the model's family is not known.
    """
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
    """The model as a stage made by `pipeline_module`; None if it is an ordinary one.

    Raises:
        UserError: it is a pipeline that someone else has made.
    """
    from deepspeed.pipe import PipelineModule

    if not isinstance(model, PipelineModule):
        return None
    from megalowbit.engine.pipeline.stage import PipelinedModel

    if not isinstance(model, PipelinedModel):
        raise UserError(
            f"model is a {type(model).__name__} of its own, whose names and tied weights are not known here: "
            "pass mlb.pipeline_module(model, num_stages=…) of a Hugging Face model"
        )
    return model


def check_stages(model: torch.nn.Module, parts: DeepSpeedConfigParts, grid: ProcessGrid) -> None:
    """Refuse a model that is not cut as the configuration says, and settings that stages cannot honour."""
    if stage_of(model) is None and grid.pipeline_size > 1:
        raise UserError(
            f"{PIPELINE_KEY} = {grid.pipeline_size} but the model is whole: pass "
            f"mlb.pipeline_module(model, num_stages={grid.pipeline_size})"
        )
    check_pipeline(parts.deepspeed, parts.settings, grid.pipeline_size)


def check_block(model: torch.nn.Module, block: Mapping[str, Any] | None) -> None:
    """Refuse a configuration that says otherwise than `pipeline_module` was told.

    `block` is what the user has set of `pipeline`. Recomputation may be asked for in either place.
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
                f"pipeline.{key} = {said!r} but pipeline_module was called with {argument} = {value!r}: "
                "let both be the same, or leave the key out"
            )


def whole_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model in which layers are to be converted: of a stage, all of it."""
    stage = stage_of(model)
    return model if stage is None or stage.whole is None else stage.whole


def begin_stage(model: torch.nn.Module, parts: DeepSpeedConfigParts) -> None:
    """What a stage needs once the whole model is converted; nothing for other models.

    Raises:
        UserError: activations are recomputed where a replay could not start its splits as the first time.
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
    """Process groups of a stage; None for other models, which have none of their own."""
    stage = stage_of(model)
    return None if stage is None else stage.groups()


def attach_pipeline(engine: Any) -> None:
    """Let a new engine read and check a step's batches first, and sum tied gradients where ours are.

    Nothing is done to engines of other models.
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


def release_whole(module: torch.nn.Module) -> None:
    """Let a stage forget the other stages' modules; nothing for other models."""
    stage = stage_of(module)
    if stage is not None:
        stage.release()


def gather_weights(module: PipelinedModel) -> dict[str, torch.Tensor] | None:
    """The whole model's weights as `restore` would leave them, on the CPU of rank 0; None on other ranks.

    Every rank must call it.
    """
    rank, device = process_group.rank(), next(module.parameters()).device
    mine = plain_state_dict(module)
    whole = dict(mine)
    for stage in range(1, module.num_stages):
        sender = module._topo.get_rank(pipe=stage, data=0)
        shapes: list[Any] = [{name: (value.shape, value.dtype) for name, value in mine.items()}]
        dist.broadcast_object_list(shapes, src=sender)
        for name, (shape, dtype) in shapes[0].items():
            if rank == sender:
                dist.send(mine[name].to(device).contiguous(), dst=0)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, src=sender)
                whole[name] = received.cpu()
    return whole if rank == 0 else None


def _wait_for_the_average(engine: Any) -> None:
    """Take the place of DeepSpeed's reduction of tied gradients, which comes before the average."""


def _reduce_gradients(engine: Any) -> None:
    """Average over data parallel as DeepSpeed does, then sum over the copies of a tied weight."""
    tied = [each for each in engine.module.get_tied_weights_and_groups() if each[0].requires_grad]
    if engine.zero_optimization_stage():
        for weight, group in tied:
            _sum_before_partition(engine, weight, group)
    engine._exec_reduce_grads()
    if not engine.zero_optimization_stage():
        for weight, group in tied:
            dist.all_reduce(weight.main_grad, group=group)


def _sum_before_partition(engine: Any, weight: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    """Average a tied weight's gradient here, then sum it: ZeRO keeps pieces, which differ by stage.

    DeepSpeed's average, which follows, is then one of equal numbers.
    """
    gradient = engine.optimizer.get_gradient_for_reduction(weight)
    peers = engine.module.groups().data
    ranks = process_group.world_size(peers)
    if ranks > 1:
        dist.all_reduce(gradient, group=peers)
        gradient.div_(ranks)
    dist.all_reduce(gradient, group=group)
