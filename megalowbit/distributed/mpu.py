"""Adapts Megatron's `parallel_state` to the model-parallel unit (`mpu`) that DeepSpeed expects.

Megatron provides tensor-, pipeline- and data-parallel groups. DeepSpeed also needs ranks, sizes and members,
under names that Megatron dropped or never had. Here everything is derived from the groups, which must divide
the world into a grid in the order of `ProcessGrid`. If the mpu also returns ranks or sizes, they must agree
with the groups. An older mpu that has only a model-parallel group is treated as tensor-parallel.

Not supported, and rejected: context, expert and sequence parallelism. DeepSpeed 0.19.8 would mistake their
groups for data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.distributed.process_grid import TENSOR_KEY, ProcessGrid
from megalowbit.errors import UserError

# names under which an mpu may have the same group, the usual one first
TENSOR = ("get_tensor_model_parallel", "get_slice_parallel")
PIPELINE = ("get_pipeline_model_parallel", "get_pipe_parallel")
DATA = ("get_data_parallel",)
MODEL = ("get_model_parallel",)
# sizes above 1 of these are rejected
REFUSED = {
    "get_context_parallel_world_size": "context parallelism",
    "get_expert_model_parallel_world_size": "expert parallelism",
    "get_sequence_parallel_world_size": "sequence parallelism",
}


@dataclass(frozen=True, kw_only=True)
class GroupsOfRank:
    """The mpu interface of DeepSpeed 0.19.8 over four process groups of this rank; no sequence parallelism.

    Ranks are group ranks, 0 … size-1, except for `src_rank` and `group_ranks`, which are world ranks.

    Attributes:
        data: ranks with the same weights.
        model: ranks that together hold one copy of the model.
        tensor: of those, the ranks that share each layer.
        pipeline: of those, the ranks of consecutive stages; `None`: there is one stage.
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
    """Complete an mpu for DeepSpeed. Not collective; needs an initialised process group.

    Args:
        mpu: Megatron's `parallel_state`, or any module or object with functions of the same names; None
            returns None.

    Raises:
        UserError: a group is missing or lacks this rank, or the groups do not form a process grid.
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
    if not has_stages:  # without a pipeline the two groups are the same
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
    """The process grid, from an adapted mpu, a pipeline module's stages or DeepSpeed's configuration.

    Raises:
        UserError: two of these divide the job, or its processes cannot be divided that way.
    """
    rank, world_size = process_group.rank(), process_group.world_size()
    grid = ProcessGrid.from_config(config, rank, world_size)
    if mpu is not None:
        if grid.model_parallel_size > 1:
            raise UserError(
                f"mpu and the configuration ({grid}) both partition the model: leave one of them out; "
                f"with your own mpu, leave out {TENSOR_KEY}"
            )
        if stages is not None:
            raise UserError(
                "mpu and a pipeline module both partition the model: leave mpu out, the stages have groups"
            )
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
    """The result of an mpu function; None if it is missing, or if its parallelism is not initialised."""
    function: Callable[[], Any] | None = getattr(mpu, name, None)
    if function is None:
        return None
    try:
        return function()
    except AssertionError:  # Megatron's sign that a group was not created
        return None
    except Exception as error:  # anything that user code may raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"mpu.{name}() raises {type(error).__name__}: {reason}; initialise Megatron's parallel state "
            "before megalowbit.initialize"
        ) from error


def _group(mpu: Any, prefixes: tuple[str, ...]) -> Any:
    """The first group that the mpu returns under one of the names.

    Raises:
        UserError: it is not a process group, or does not include this rank.
    """
    for prefix in prefixes:
        group = _ask(mpu, f"{prefix}_group")
        if group is None:
            continue
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise UserError(
                f"mpu.{prefix}_group() is not a process group of rank {process_group.rank()}: "
                "return the group that the calling rank belongs to"
            )
        return group
    return None


def _check_grid(mpu: GroupsOfRank) -> None:
    """Reject groups that differ from those of a `ProcessGrid` of the same sizes."""
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
            f"mpu's groups do not fit together: {listed} = {product} processes, but the job has "
            f"{world_size}; create groups whose sizes multiply to {world_size}"
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
                f"mpu's {name}-parallel group of rank {grid.rank} has ranks {members}, not {list(ranks)}: "
                "use Megatron's default order, in which tensor ranks are adjacent and stages are outermost"
            )


def _check_statements(mpu: Any, units: GroupsOfRank) -> None:
    """Reject an mpu whose ranks and sizes contradict its groups."""
    for prefixes in (DATA, MODEL, TENSOR, PIPELINE):
        for prefix in prefixes:
            for suffix in ("_rank", "_world_size", "_src_rank", "_group_ranks"):
                truth = getattr(units, f"{prefixes[0]}{suffix}", None)
                said = _ask(mpu, f"{prefix}{suffix}") if truth is not None else None
                if said is not None and truth is not None and _plain(said) != truth():
                    raise UserError(
                        f"mpu.{prefix}{suffix}() = {said} on rank {process_group.rank()}, but its group "
                        f"gives {truth()}: return that value"
                    )


def _plain(said: Any) -> Any:
    return said if isinstance(said, int) else list(said)
