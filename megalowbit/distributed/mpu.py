"""The model-parallel unit (`mpu`) that DeepSpeed asks who shares what, from Megatron's `parallel_state`.

Megatron has a tensor-, a pipeline- and a data-parallel group, and DeepSpeed further asks for ranks, sizes and
members, under names that Megatron dropped or never had. Here everything follows from the groups alone, which
must cut the world into a grid in the order of `ProcessGrid`; what an mpu says besides must agree with them.
Older units that know a model-parallel group only are taken as tensor-parallel.
Not covered, and refused: context, expert and sequence parallelism, whose groups DeepSpeed 0.19.8 would take
for data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.distributed.process_grid import TENSOR_KEY, ProcessGrid
from megalowbit.errors import UserError

# how an mpu may call the same group, the usual name first
TENSOR = ("get_tensor_model_parallel", "get_slice_parallel")
PIPELINE = ("get_pipeline_model_parallel", "get_pipe_parallel")
DATA = ("get_data_parallel",)
MODEL = ("get_model_parallel",)
# parallelism that multiplies with the others; sizes above 1 are refused
REFUSED = {
    "get_context_parallel_world_size": "context parallelism",
    "get_expert_model_parallel_world_size": "expert parallelism",
    "get_sequence_parallel_world_size": "sequence parallelism",
}


@dataclass(frozen=True, kw_only=True)
class GroupsOfRank:
    """What DeepSpeed 0.19.8 asks of an mpu, over four process groups of this rank; no sequence parallelism.

    Ranks are 0 … world_size-1 in the group; those of `src_rank` and `group_ranks` are of the world.

    Attributes:
        data: ranks with the same weights.
        model: ranks that hold one copy of the model among them.
        tensor: of those, the ranks that share each layer.
        pipeline: of those, the ranks that follow each other; `None`: there is one stage.
    """

    data: dist.ProcessGroup
    model: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup | None = None

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self.tensor)[0]

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.pipeline

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0 if self.pipeline is None else dist.get_rank(self.pipeline)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1 if self.pipeline is None else dist.get_world_size(self.pipeline)


def adapt_mpu(mpu: Any) -> GroupsOfRank | None:
    """Complete an mpu for DeepSpeed; not collective, and in an initialised process group only.

    Args:
        mpu: Megatron's `parallel_state`, as a module or an object, or anything with functions of those names;
            None stays None.

    Raises:
        UserError: a group is missing, does not hold this rank, or the groups cut no grid out of the world.
    """
    if mpu is None:
        return None
    if hasattr(mpu, "initialize_sequence_parallel"):
        raise UserError("mpu is one of sequence parallelism, which is not supported: leave it out")
    for name, what in REFUSED.items():
        if (size := _ask(mpu, name)) not in (None, 1):
            raise UserError(f"mpu.{name}() = {size}: {what} is not supported, set it to 1")
    data, tensor, pipeline, model = (_group(mpu, prefixes) for prefixes in (DATA, TENSOR, PIPELINE, MODEL))
    has_stages = pipeline is not None and dist.get_world_size(pipeline) > 1
    if not has_stages:  # then these two are the same
        tensor, model = tensor or model, model or tensor
    for group, names in ((data, DATA), (tensor, TENSOR), (model, MODEL)):
        if group is None:
            raise UserError(f"mpu has no {names[0]}_group(): initialise Megatron's parallel state, or add it")
    units = GroupsOfRank(data=data, model=model, tensor=tensor, pipeline=pipeline)
    _check_grid(units)
    _check_statements(mpu, units)
    return units


def find_grid(
    config: Mapping[str, Any], *, stages: int | None = None, mpu: GroupsOfRank | None = None
) -> ProcessGrid:
    """Where this process stands, from whatever cuts the job.

    That is an adapted mpu, the stages that a pipeline module brings along, or DeepSpeed's configuration.

    Raises:
        UserError: two of them cut the job, or it cannot be cut like that.
    """
    rank, world_size = process_group.rank(), process_group.world_size()
    grid = ProcessGrid.from_config(config, rank, world_size)
    if mpu is not None:
        if grid.model_parallel_size > 1:
            raise UserError(
                f"mpu and the configuration ({grid}) both cut the model: leave one of them out, "
                f"{TENSOR_KEY} for an mpu of your own"
            )
        if stages is not None:
            raise UserError("mpu and a pipeline module both cut the job: leave mpu out, stages have groups")
        return _grid_of(mpu)
    if stages is None or stages == grid.pipeline_size:
        return grid
    if grid.pipeline_size > 1:
        raise UserError(
            f"pipeline.stages = {grid.pipeline_size} but model is a PipelineModule of {stages} stages: "
            "remove pipeline.stages"
        )
    return ProcessGrid(rank, world_size, tensor_size=grid.tensor_size, pipeline_size=stages)


def _grid_of(mpu: GroupsOfRank) -> ProcessGrid:
    return ProcessGrid(
        process_group.rank(),
        process_group.world_size(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
    )


def _ask(mpu: Any, name: str) -> Any:
    """What a function of the mpu returns; None where there is none, or its parallelism is not initialised."""
    function: Callable[[], Any] | None = getattr(mpu, name, None)
    if function is None:
        return None
    try:
        return function()
    except AssertionError:  # how Megatron says that a group was not made
        return None
    except Exception as error:  # whatever the user's code raises
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"mpu.{name}() raises {type(error).__name__}: {reason}; initialise Megatron's parallel state "
            "before megalowbit.initialize"
        ) from error


def _group(mpu: Any, prefixes: tuple[str, ...]) -> Any:
    """The first group that the mpu has under one of the names.

    Raises:
        UserError: it is no process group, or one without this rank.
    """
    for prefix in prefixes:
        group = _ask(mpu, f"{prefix}_group")
        if group is None:
            continue
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise UserError(
                f"mpu.{prefix}_group() is no process group of rank {process_group.rank()}: "
                "let it return the group that the calling rank belongs to"
            )
        return group
    return None


def _check_grid(mpu: GroupsOfRank) -> None:
    """Refuse groups that are not those of a `ProcessGrid` with their sizes."""
    sizes = {
        "data": mpu.get_data_parallel_world_size(),
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
    }
    world_size = process_group.world_size()
    product = sizes["data"] * sizes["tensor"] * sizes["pipeline"]
    if product != world_size:
        listed = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"mpu's groups do not fit together: {listed} = {product} processes, and the job has "
            f"{world_size}; make groups that divide it"
        )
    grid = _grid_of(mpu)
    expected = {
        "data": (mpu.data, grid.data_ranks),
        "tensor": (mpu.tensor, grid.tensor_ranks),
        "model": (mpu.model, grid.model_parallel_ranks),
        **({} if mpu.pipeline is None else {"pipeline": (mpu.pipeline, grid.pipeline_ranks)}),
    }
    for name, (group, ranks) in expected.items():
        members = dist.get_process_group_ranks(group)
        if tuple(members) != ranks:
            raise UserError(
                f"mpu's {name}-parallel group of rank {grid.rank} has ranks {members} and not {list(ranks)}: "
                "tensor ranks must be neighbours and stages outermost, Megatron's default order"
            )


def _check_statements(mpu: Any, units: GroupsOfRank) -> None:
    """Refuse an mpu whose ranks and sizes are not those of its groups."""
    for prefixes in (DATA, MODEL, TENSOR, PIPELINE):
        for prefix in prefixes:
            for suffix in ("_rank", "_world_size", "_src_rank", "_group_ranks"):
                truth = getattr(units, f"{prefixes[0]}{suffix}", None)
                said = _ask(mpu, f"{prefix}{suffix}") if truth is not None else None
                if said is not None and truth is not None and _plain(said) != truth():
                    raise UserError(
                        f"mpu.{prefix}{suffix}() = {said} on rank {process_group.rank()} but its group says "
                        f"{truth()}: let it return that"
                    )


def _plain(said: Any) -> Any:
    return said if isinstance(said, int) else list(said)
