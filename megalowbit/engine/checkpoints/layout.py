"""Describes how an engine is partitioned: the `Layout` of the checkpoint that it is about to save.

This is the only file that reads DeepSpeed's bookkeeping of flat groups: `round_robin_bit16_groups` and
`…_offsets` (stages 1, 2), `fp16_groups` and `partition_numel` (stage 3);
tests/engine/contract/test_checkpoints.py checks each of them. A parameter without a place raises at the save
rather than at the export. Not covered: experts, NVMe, hierarchical partitions, parameters without elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megalowbit.checkpoints.layout import NOWHERE, Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import model_file
from megalowbit.distributed.agreement import failing_together, gather, share
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear

Place = tuple[int, int, int]  # group, offset, size of a StoredParameter


def describe_layout(engine: Any) -> Layout:
    """The layout of the checkpoint that `engine` saves; every rank must call it.

    Raises:
        UserError: a parameter has no place, or ranks of one slice disagree; all ranks raise it.
    """
    with failing_together():
        own = own_slice(engine), tied_names(engine)
    # gather digests from all ranks, but each slice from one rank only, because it lists every parameter
    digest = hashlib.sha256(repr(own).encode()).digest()
    first: dict[int, tuple[int, bytes]] = {}
    for rank, (index, theirs) in enumerate(gather((engine.checkpoint_mp_rank, digest))):
        if first.setdefault(index, (rank, theirs))[1] != theirs:
            raise UserError(
                f"rank {rank} has partitioned its part of the model differently from other ranks of slice "
                f"{index}: start all ranks with the same model and configuration"
            )
    slices: dict[int, Slice] = {}
    tied: dict[str, str] = {}
    for index, (rank, _) in first.items():
        slices[index], names = share(own, rank)
        tied |= names
    known = {stored.name for part in slices.values() for stored in part.parameters}
    return Layout(
        stage=engine.zero_optimization_stage(),
        data_size=engine.seq_dp_world_size,
        **grid_sizes(engine),
        slices=tuple(slices[index] for index in sorted(slices)),
        tied={alias: name for alias, name in tied.items() if alias not in known},
    )


def grid_sizes(engine: Any) -> dict[str, int]:
    """`tensor_size` and `pipeline_size` of an engine, from its grid if it has one."""
    grid = getattr(engine, "process_grid", None)
    if grid is None:
        return {"tensor_size": 1, "pipeline_size": 1}
    if grid.tensor_size * grid.pipeline_size == 1:  # a user's mpu is not in the configuration
        return {"tensor_size": engine.mp_world_size, "pipeline_size": 1}
    return {"tensor_size": grid.tensor_size, "pipeline_size": grid.pipeline_size}


def named_parameters(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Name in the full model → parameter of this rank; each parameter once."""
    module = engine.module
    names = module.parameter_names() if hasattr(module, "parameter_names") else {}
    found: dict[str, torch.nn.Parameter] = {}
    for local, parameter in module.named_parameters():
        found.setdefault(names.get(local, local), parameter)
    return found


def named_buffers(engine: Any) -> dict[str, torch.Tensor]:
    """Local name → buffer, for the buffers in the module's state dict."""
    module = engine.module
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def tied_names(engine: Any) -> dict[str, str]:
    """Further name → first name, for parameters with several names."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    if hasattr(engine.module, "parameter_names"):
        return dict(engine.module.tied_names())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def own_slice(engine: Any) -> Slice:
    """This rank's slice; the same on all data-parallel ranks of the slice.

    Raises:
        UserError: a trained parameter has no place.
    """
    stage = engine.zero_optimization_stage()
    masters, sizes = _masters(engine, stage)
    states = _states(engine, stage)
    files = _weight_files(engine, stage)
    transposed = {
        id(module.weight)
        for module in engine.module.modules()
        # conversion makes a BitLinear the same way with any number of ranks
        if getattr(module, "is_transposed", False) and not isinstance(module, BitLinear)
    }
    parameters = []
    for name, parameter in named_parameters(engine).items():
        group, offset, size = masters.get(id(parameter), (NOWHERE, 0, 0))
        state, optimizer_group = states.get(id(parameter), (NOWHERE, NOWHERE))
        if parameter.requires_grad and state == NOWHERE and _shape(parameter).numel() and stage:
            raise UserError(
                f"parameter {name} is not trained by the engine's optimizer: freeze it, or pass it to the "
                "optimizer"
            )
        sharding = getattr(parameter, "sharding", None)
        parameters.append(
            StoredParameter(
                name=name,
                shape=tuple(_shape(parameter)),
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=group,
                offset=offset,
                size=size,
                state=state,
                optimizer_group=optimizer_group,
                weight=files.get(id(parameter)),
                cut=None if sharding is None else {"dim": sharding.dim, "parts": list(sharding.parts)},
                is_transposed=id(parameter) in transposed,
                is_marked=bool(getattr(parameter, "tensor_model_parallel", False)),
            )
        )
    return Slice(
        parameters=tuple(parameters),
        partition_sizes=tuple(sizes),
        buffers=_buffer_files(engine, stage),
    )


def _masters(engine: Any, stage: int) -> tuple[dict[int, Place], list[int]]:
    """Parameter id → place of its master; and the partition sizes of stages 1 and 2."""
    optimizer = engine.optimizer
    if stage == 0:
        places: dict[int, Place] = {}
        for number, group in enumerate(optimizer.float16_groups):
            places |= {id(model): (number, index, 0) for index, model in enumerate(group)}
        return places, []
    if stage == 3:
        places = {}
        for number, group in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in group:
                places[id(parameter)] = (number, offset, parameter.partition_numel())
                offset += parameter.partition_numel()
        return places, []
    groups = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    places = {
        id(parameter): (number, int(offset), 0)
        for number, (group, offsets) in enumerate(groups)
        for parameter, offset in zip(group, offsets, strict=True)
    }
    return places, [int(size) for size in optimizer.partition_size]


def _states(engine: Any, stage: int) -> dict[int, tuple[int, int]]:
    """Id of a trained parameter → index of its saved state and of its group in the inner optimizer."""
    optimizer = engine.optimizer
    if stage == 0:
        model_of = {
            id(optimizer.master_of(parameter)): id(parameter)
            for parameter in engine.module.parameters()
            if id(parameter) in optimizer._masters
        }
        found, count = {}, 0
        for number, group in enumerate(optimizer.optimizer.param_groups):
            for each in group["params"]:
                found[model_of[id(each)]] = (count, number)
                count += 1
        return found
    if stage == 3:
        order = sorted(
            range(len(optimizer.fp16_groups)), key=lambda each: optimizer.sub_group_to_group_id[each]
        )
        return {
            id(parameter): (index, optimizer.sub_group_to_group_id[sub_group])
            for index, sub_group in enumerate(order)
            for parameter in optimizer.fp16_groups[sub_group]
        }
    return {
        id(parameter): (number, number)
        for number, group in enumerate(optimizer.round_robin_bit16_groups)
        for parameter in group
    }


def _weight_files(engine: Any, stage: int) -> dict[int, tuple[str, str]]:
    """Parameter id → file and key of the model's weight; empty at stage 3, where no rank has full weights."""
    if stage == 3:
        return {}
    return {
        id(parameter): (file, key)
        for file, prefix, module in _modules(engine, stage)
        for name, parameter in module.named_parameters()
        for key in [prefix + name]
    }


def _buffer_files(engine: Any, stage: int) -> dict[str, tuple[str, str]]:
    """Local name → file and key of the buffer."""
    names = {id(buffer): name for name, buffer in named_buffers(engine).items()}
    return {
        names[id(buffer)]: (file, prefix + name)
        for file, prefix, module in _modules(engine, stage)
        for name, buffer in module.named_buffers()
        if id(buffer) in names
    }


def _modules(engine: Any, stage: int) -> Iterable[tuple[str, str, torch.nn.Module]]:
    """(file, key prefix, module) of everything that this slice saves."""
    module = engine.module
    if not hasattr(module, "forward_funcs"):  # no pipeline
        return [(model_file(stage, engine.checkpoint_mp_rank), "", module)]
    return [
        (Path(module.ckpt_layer_path("", index)).name, "", layer)
        for index, layer in enumerate(module.forward_funcs)
        if isinstance(layer, torch.nn.Module)
    ]


def _shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the unpartitioned parameter, which ZeRO 3 keeps in `ds_shape`."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
