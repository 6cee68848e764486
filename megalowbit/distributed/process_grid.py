"""The process grid: a process's data, tensor and pipeline index, as pure arithmetic on ranks.

rank = (stage · data_size + data_rank) · tensor_size + tensor_rank, as in DeepSpeed: tensor ranks are adjacent
(AutoTP, and Megatron's default order), stages are outermost (`PipeDataParallelTopology`). No group is created
and neither torch nor DeepSpeed is imported, so a configuration is checked before their seconds of loading.
Not covered: tensor and pipeline parallelism together (rejected), sequence and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalowbit.errors import UserError, shown

TENSOR_KEY = "tensor_parallel.autotp_size"
PIPELINE_KEY = "pipeline.stages"


@dataclass(frozen=True)
class ProcessGrid:
    """One process of a grid of `pipeline_size` × `data_size` × `tensor_size` processes.

    Attributes:
        rank: 0 … world_size-1, in the world.
        world_size: processes of the job.
        tensor_size: processes that share each layer.
        pipeline_size: stages that share the layers among them.

    Raises:
        UserError: a size does not divide the world size, or both sizes are above 1.
    """

    rank: int
    world_size: int
    tensor_size: int = 1
    pipeline_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be 0 … world_size-1: {self.rank}, {self.world_size}")
        if self.tensor_size > 1 and self.pipeline_size > 1:
            raise UserError(
                f"{TENSOR_KEY} = {self.tensor_size} cannot be used with {PIPELINE_KEY} = "
                f"{self.pipeline_size}: set one of them to 1"
            )
        for key, size in ((TENSOR_KEY, self.tensor_size), (PIPELINE_KEY, self.pipeline_size)):
            if size < 1:
                raise UserError(f"{key} = {size} must be a whole number ≥ 1")
            if self.world_size % size:
                raise UserError(
                    f"{key} = {size} does not divide the {self.world_size} "
                    f"process{'' if self.world_size == 1 else 'es'} of the job: "
                    f"start a multiple of {size}, or set it to a divisor of {self.world_size}"
                )

    @classmethod
    def from_config(cls, deepspeed_config: Mapping[str, Any], rank: int, world_size: int) -> ProcessGrid:
        """Read the sizes from a DeepSpeed configuration as the user wrote it; sizes default to 1.

        Raises:
            UserError: a size is not a whole number ≥ 1, or the sizes do not fit the world size.
        """
        return cls(rank, world_size, *_sizes(deepspeed_config))

    @classmethod
    def smallest(cls, deepspeed_config: Mapping[str, Any], data_size: int) -> ProcessGrid:
        """Rank 0 of the smallest grid of the configured sizes with `data_size` data-parallel ranks."""
        tensor_size, stages = _sizes(deepspeed_config)
        return cls(0, tensor_size * stages * data_size, tensor_size, stages)

    @property
    def data_size(self) -> int:
        """Processes that train the same weights on different data."""
        return self.world_size // (self.tensor_size * self.pipeline_size)

    @property
    def data_rank(self) -> int:
        """0 … data_size-1: the part of the data; also determines rounding and dropout."""
        return self.rank // self.tensor_size % self.data_size

    @property
    def tensor_rank(self) -> int:
        """0 … tensor_size-1: the shard of each sharded layer."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """0 … pipeline_size-1: the pipeline stage."""
        return self.rank // (self.data_size * self.tensor_size)

    @property
    def model_parallel_size(self) -> int:
        """Processes that together hold one copy of the model."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """World ranks of this process's tensor-parallel group, in order."""
        first = self.rank - self.tensor_rank
        return tuple(range(first, first + self.tensor_size))

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """World ranks that hold the same weights as this process, in order."""
        first = self.stage * self.data_size * self.tensor_size + self.tensor_rank
        return tuple(first + index * self.tensor_size for index in range(self.data_size))

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """World ranks of the stages that this process's data passes through, first stage first."""
        per_stage = self.data_size * self.tensor_size
        return tuple(self.rank % per_stage + stage * per_stage for stage in range(self.pipeline_size))

    @property
    def model_parallel_ranks(self) -> tuple[int, ...]:
        """World ranks that together hold one copy of the model, in order."""
        return self.tensor_ranks if self.pipeline_size == 1 else self.pipeline_ranks

    def __str__(self) -> str:
        """`"2 × 2: data 2, tensor 2"`, or `"data 4"` if the model is not partitioned."""
        sizes = {"data": self.data_size, "tensor": self.tensor_size, "stages": self.pipeline_size}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
        product = " × ".join(str(size) for size in used.values())
        names = ", ".join(f"{name} {size}" for name, size in used.items())
        return f"{product}: {names}" if len(used) > 1 else names


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    # 0 is DeepSpeed's own default: no tensor parallelism
    return _size(config, TENSOR_KEY, unset=(None, 0)), _size(config, PIPELINE_KEY, unset=(None,))


def _size(config: Mapping[str, Any], dotted: str, *, unset: tuple[object, ...]) -> int:
    block_name, key = dotted.split(".")
    block = config.get(block_name)
    value = block.get(key) if isinstance(block, Mapping) else None
    if value in unset and not isinstance(value, bool):
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{dotted} = {shown(value)} must be a whole number ≥ 1, or left out")
    return value
