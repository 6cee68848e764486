"""Whether the run fits: memory of a device and of a host, and room for its checkpoints.

Device and host memory are the estimates of `pretrain --dry-run`. They leave out fragmentation, so more than
`USABLE` of the memory is a warning. A process on a host is given `PROCESS` for Python and its libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalowbit.doctor.notices import Notice, note, problem, warning
from megalowbit.doctor.plan import RunPlan, setting
from megalowbit.doctor.target import Target
from megalowbit.pretrain.estimate.memory import GIB
from megalowbit.pretrain.estimate.starting_config import USABLE
from megalowbit.values import counted

PROCESS = GIB // 2  # of Python and libraries (`start_memory.py`)
SAVE_BYTES = 0.25e9  # of a rank in a second, on a local disk, hashed (docs/scaling.md)
WORTHWHILE = GIB  # saved by ZeRO before it is suggested


def device_bytes(plan: RunPlan, target: Target) -> int:
    """Of one process on its device; on CPUs the host is the device."""
    if target.is_cpu:
        return plan.memory.total - plan.memory.context_and_communication + plan.memory.on_the_host
    return plan.memory.total


def host_bytes(plan: RunPlan, target: Target) -> int:
    """Of the host of rank 0, with its processes."""
    local = min(plan.processes, target.devices_of_host)
    if target.is_cpu:
        start = plan.start.reading + local * plan.start.of_rank_on_cpu
        return max(start, local * device_bytes(plan, target)) + local * PROCESS
    return plan.host_bytes(local) + local * PROCESS


def save_seconds(plan: RunPlan, disk: float | None) -> float:
    """Of a checkpoint: the longer of all ranks' bytes at the disk's speed and of one rank's own.

    Args:
        plan: the run.
        disk: bytes/s of all hosts together; None: unknown.
    """
    grid = plan.config.grid
    of_rank = plan.checkpoint_bytes / grid.model_parallel_size
    if plan.zero_stage:
        weights = plan.weight_bytes * plan.parameters / grid.model_parallel_size
        of_rank = (of_rank - weights) / grid.data_size + weights
    seconds = of_rank / SAVE_BYTES
    return seconds if disk is None else max(seconds, plan.checkpoint_bytes / disk)


def check_memory(plan: RunPlan, target: Target, host_memory: float | None) -> Iterator[Notice]:
    """Notices about memory.

    Args:
        plan: the run.
        target: with the memory of a device.
        host_memory: GiB of a host; None: unknown, as for a target that is not this machine.
    """
    needed, has = device_bytes(plan, target) / GIB, target.memory
    sized = " (the smallest number of processes; --processes sets another)" * plan.config.is_sized_to_fit
    text = f"one of {plan.processes} processes{sized} needs {needed:.1f} of {target.name}'s {has:.1f} GiB"
    if needed > has:
        yield problem("memory-device", f"{text}: it does not fit", _way_to_fit(plan))
    elif needed > USABLE * has:
        yield warning(
            "memory-device", f"{text}, over {USABLE:.0%}: fragmentation may not fit", _way_to_fit(plan)
        )
    on_host = host_bytes(plan, target) / GIB
    if host_memory is not None and on_host > host_memory:
        yield problem(
            "memory-host",
            f"the processes of one host need {on_host:.1f} GiB of its memory, which is {host_memory:.1f} GiB",
            "leave out offload_optimizer and offload_param, or use fewer processes on a host",
        )
    yield from _check_zero(plan)


def _way_to_fit(plan: RunPlan) -> str:
    ways = []
    if plan.micro_batch > 1:
        ways.append(setting("train_micro_batch_size_per_gpu", max(1, plan.micro_batch // 2)))
    highest = 3 if plan.config.grid.pipeline_size == 1 else 1  # a pipeline takes no higher stage
    if plan.zero_stage < highest and plan.config.grid.data_size > 1:
        ways.append(setting("zero_optimization.stage", plan.zero_stage + 1))
    if plan.recomputed_share < 1:
        key = "megalowbit.activation_checkpointing.every"
        is_piped = plan.config.grid.pipeline_size > 1
        ways.append(setting("pipeline.activation_checkpoint_interval" if is_piped else key, 1))
    return " or ".join(ways) or "more or larger devices, or divide the model (docs/parallelism.md)"


def _check_zero(plan: RunPlan) -> Iterator[Notice]:
    size = plan.config.grid.data_size
    if plan.zero_stage or size == 1:
        return
    saved = (plan.memory.master_parameters + plan.memory.optimizer_moments) * (size - 1) // size
    if saved > WORTHWHILE:
        yield note(
            "zero-stage",
            f"at ZeRO stage 0 every rank keeps all masters and moments: stage 1 would free "
            f"{saved / GIB:.1f} GiB of each",
            setting("zero_optimization.stage", 1),
        )


def check_room(plan: RunPlan, free: float, folder: str) -> Iterator[Notice]:
    """Notices about the room that checkpoints need in the run folder's file system, `free` in bytes."""
    settings = plan.config.settings.checkpoint
    if settings.keep is None and settings.every:
        count = plan.steps // settings.every + 1
    else:
        # the newest are removed only after another one is complete; the best one is kept beside them
        count = 1 if not settings.every else (settings.keep or 1) + 1
    exported = plan.parameters * plan.weight_bytes * settings.export_hf
    needed = count * plan.checkpoint_bytes + exported
    if needed > free:
        kept = " (checkpoint.keep and one more)" if settings.keep and settings.every else ""
        yield problem(
            "disk-room",
            f"{folder} has {free / GIB:.1f} GiB free; {counted(count, 'checkpoint')} of "
            f"{plan.checkpoint_bytes / GIB:.1f} GiB{kept} and the export need {needed / GIB:.1f} GiB",
            "free space, name another --run-dir, or lower megalowbit.checkpoint.keep",
        )


def to_dict(plan: RunPlan, target: Target) -> dict[str, Any]:
    """For JSON: GiB by purpose."""
    parts = {name: size / GIB for name, size in vars(plan.memory).items()}
    return {
        "device": {**parts, "total": device_bytes(plan, target) / GIB, "available": target.memory},
        "host": {
            "processes": min(plan.processes, target.devices_of_host),
            "total": host_bytes(plan, target) / GIB,
            "tensor_read": plan.start.tensor / GIB,
            "offloaded_by_each": plan.start.offloaded / GIB,
        },
    }
