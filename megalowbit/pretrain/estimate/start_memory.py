"""Estimates the host memory that a run needs while it starts, beside libraries and data.

Rank 0 reads the weights one tensor at a time and broadcasts them from its device. On GPUs, the host of rank 0
holds the tensor that is read, and every host what ZeRO offloads. On CPUs the device is the host: each process
also holds the tensor that is broadcast, and its part of the model.

Not covered: Python and libraries (about 0.5 GiB a process), the data, and freed memory that glibc keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalowbit.config.zero import zero_stage
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.estimate.memory import GIB, MemoryEstimate

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """Bytes while a run starts, at the largest.

    Attributes:
        tensor: of the largest weight in fp32: while it is broadcast, on the device of each rank, and before
            on the host of rank 0.
        reading: of further copies of it on the host of rank 0: as it is stored, and before it was changed.
        kept: of what a rank takes of it, on the device, before it is in its place.
        arriving: of a rank's part of the model, on its device, while weights arrive.
        building: of the same while the engine is built, before or after.
        offloaded: of the part that ZeRO moves to the host.
        processes: of the run.
    """

    tensor: int
    reading: int
    kept: int
    arriving: int
    building: int
    offloaded: int
    processes: int

    @property
    def on_gpus(self) -> int:
        """Host memory of all processes together, if each has a GPU."""
        return self.tensor + self.reading + self.processes * self.offloaded

    @property
    def on_cpus(self) -> int:
        """Memory of all processes together, if none has a GPU."""
        return self.reading + self.processes * self.of_rank_on_cpu

    @property
    def of_rank_on_cpu(self) -> int:
        """Memory of a process without a GPU that does not read."""
        return max(self.tensor + self.kept + self.arriving, self.building) + self.offloaded

    def __str__(self) -> str:
        return (
            f"  {'all processes, on GPUs':<25} {self.on_gpus / GIB:9.3f} GiB\n"
            f"  {'all processes, on CPUs':<25} {self.on_cpus / GIB:9.3f} GiB, the model included"
        )


def estimate_start(
    config: PretrainConfig, memory: MemoryEstimate, settings: ModelSettings | None = None
) -> StartEstimate:
    """Estimate the start of a run of which one process needs `memory` later.

    `settings` describe a model with the same weights that can be built here; None: that of the run.
    """
    settings = settings or config.settings.model
    stage = zero_stage(config.parts.deepspeed)
    model = build_model(settings, seed=0, device="meta")
    tensor = FP32_BYTES * max(parameter.numel() for parameter in model.parameters())
    built = memory.parameters + memory.main_gradients + memory.master_parameters + memory.reduction_buffers
    if stage == 0:  # fp32 weights, as large as their gradients; masters are copied from them
        arriving, building = memory.main_gradients, built
    else:  # stages 1 and 2 copy the parameters into a flat tensor before they free them
        arriving, building = built, 2 * memory.parameters * (stage < 3)
    return StartEstimate(
        tensor=tensor,
        reading=tensor * _copies(config.settings.model),
        kept=-(-tensor // config.grid.data_size) if stage == 3 else 0,
        arriving=arriving,
        building=building,
        offloaded=memory.on_the_host,
        processes=config.grid.world_size,
    )


def _copies(settings: ModelSettings) -> int:
    """Copies of a weight beside its final fp32 values while it is read: stored, multiplied, padded."""
    changes = (settings.checkpoint, settings.outliers, settings.pad_vocab_to_multiple_of)
    return sum(change is not None for change in changes)
