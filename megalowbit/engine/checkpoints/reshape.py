"""Continue from a checkpoint of another ZeRO stage or process grid by re-sharding full tensors.

For one parameter at a time, read its full master and moments from the checkpoint and copy this rank's
fragments to where the engine keeps them. Hyper-parameters, step counts, scheduler and counters follow.
`parameter.sharding` selects a tensor-parallel shard; a pipeline stage takes the parameters it has now.
The restored numbers equal the saved ones bit for bit; later losses differ from those of the uninterrupted run
only by the order of sums.

Not covered: layer scaling; optimizer states that have another shape than the parameter and are not numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.checkpoints.layout import NOWHERE, Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import is_moment, part_of
from megalowbit.distributed.agreement import succeed_together
from megalowbit.engine.checkpoints.layout import named_buffers, named_parameters
from megalowbit.errors import UserError
from megalowbit.optim.schedules.scheduler import LRScheduler

REMEDY = "resume with the model and settings it was saved with, or start from its weights"


def check_fits(
    contents: CheckpointContents, present: Layout, *, recipes: tuple[str | None, str | None] = (None, None)
) -> None:
    """Check that the checkpoint's parameters fit an engine with layout `present`; changes nothing.

    `recipes` are the saved and the present recipe, if known; a recipe determines the weights' orientation.

    Raises:
        UserError: a parameter differs in name, shape or being trained, or shards without a known sharding
            would have to be re-sharded.
    """
    saved = contents.layout
    assert saved is not None
    where = f"checkpoint {contents.folder}"
    if saved != present:
        for layout in (saved, present):
            for stored in _first_places(layout).values():
                layout.check_sharding(stored, where)
    before, now = _full_shapes(saved), _full_shapes(present)
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            if None not in recipes and recipes[0] != recipes[1]:
                raise UserError(
                    f"{where} was saved with recipe {recipes[0]}, but the model has {recipes[1]} (parameter "
                    f"{name}: shape {before.get(name)} there, {now.get(name)} here); use the saved recipe"
                )
            raise UserError(
                f"{where} does not fit the model: parameter {name} has shape {before.get(name)} there and "
                f"{now.get(name)} in the model; use the model it was saved with"
            )
    for name, each in _first_places(saved).items():
        if (each.state == NOWHERE) != (_first_places(present)[name].state == NOWHERE):
            was = "frozen" if each.state == NOWHERE else "trained"
            raise UserError(f"{where} does not fit the model: parameter {name} was {was}; {REMEDY}")
    if "layer_scaling" in (contents.header.get("optimizer") or {}) and saved != present and present.stage:
        raise UserError(f"{where} has layer scaling, which ZeRO {present.stage} does not support; {REMEDY}")


def load_reshaped(engine: Any, contents: CheckpointContents, present: Layout) -> None:
    """Load a checkpoint that passed `check_fits` into an engine of layout `present`; collective.

    Raises:
        UserError: the files contradict their layout, or the update rule differs; all ranks raise it.
    """
    if present.stage == 3:
        engine.optimizer.checkpoint_event_prologue()
    succeed_together(_fill, engine, contents, present)
    if present.stage == 3:
        engine.optimizer.checkpoint_event_epilogue()


@torch.no_grad()
def _fill(engine: Any, contents: CheckpointContents, present: Layout) -> None:
    part = present.slices[engine.checkpoint_mp_rank]
    target, places = _Target(engine, present, part), {each.name: each for each in part.parameters}
    for name, parameter in named_parameters(engine).items():
        target.load_parameter(parameter, places[name], contents)
    names = set(contents.names())
    for name, buffer in named_buffers(engine).items():
        if name in names:
            buffer.copy_(contents.weight(name))
    target.finish()
    _load_counters(engine, contents.header)


class _Target:
    """Writes masters and optimizer state into an engine. States are indexed as in the inner optimizer."""

    def __init__(self, engine: Any, layout: Layout, part: Slice) -> None:
        self._optimizer, self._layout, self._part = engine.optimizer, layout, part
        self._grid = engine.process_grid
        self._states: dict[int, dict[str, Any]] = {}
        self._groups: dict[int, dict[str, Any]] = {}

    def load_parameter(
        self, parameter: torch.nn.Parameter, stored: StoredParameter, contents: CheckpointContents
    ) -> None:
        full = self._shard_of(contents.weight(stored.name), parameter, stored)
        if self._layout.stage == 3:
            if stored.group == NOWHERE:
                _copy_partition(full, parameter, self._grid.data_rank)
        else:
            parameter.data.copy_(full)
        for flat, value in self._pieces(full, parameter, stored):
            flat.copy_(value)
        if stored.state == NOWHERE:
            return
        self._groups.setdefault(stored.optimizer_group, contents.hyper_parameters(stored.name))
        entry = self._states.setdefault(stored.state, {})
        for key, value in contents.optimizer_state(stored.name).items():
            if not is_moment(value):
                # a copy: parameters of one flat group share one step count, which each would advance
                entry[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if key not in entry:
                entry[key] = torch.zeros_like(self._master(parameter, stored), dtype=value.dtype)
            shard = self._shard_of(value, parameter, stored)
            for flat, piece in self._pieces(shard, parameter, stored, of=entry[key]):
                flat.copy_(piece)

    def finish(self) -> None:
        """Load the collected states into the inner optimizer, and update half-precision copies."""
        optimizer, inner = self._optimizer, self._optimizer.optimizer
        if self._layout.stage == 3:
            optimizer._set_fp32_optimizer_param_groups()
        saved = inner.state_dict()
        saved["state"] = {index: entry for index, entry in self._states.items() if entry}
        for number, group in enumerate(saved["param_groups"]):
            group.update(self._groups.get(number, {}))
        if self._layout.stage == 0:
            optimizer.load_state_dict({**optimizer.state_dict(), "optimizer": saved})
        else:
            inner.load_state_dict(saved)
        if self._layout.stage == 3:
            optimizer._clear_fp32_optimizer_param_groups()
            _refresh_partitions(optimizer)
        elif self._layout.stage:
            optimizer._link_all_hp_params()
            # otherwise DeepSpeed links states after the next step of the first group only
            optimizer._hp_optimizer_states_linked = False
            if any(self._states.values()):
                optimizer._lazy_init_hp_params_optimizer_state()

    def _shard_of(
        self, full: torch.Tensor, parameter: torch.nn.Parameter, stored: StoredParameter
    ) -> torch.Tensor:
        """This rank's shard, in the orientation in which the engine holds it."""
        full = full.t().contiguous() if stored.is_transposed else full
        sharding = getattr(parameter, "sharding", None)
        if sharding is None:
            return full
        shard: torch.Tensor = sharding.shard(full, self._grid.tensor_rank, self._layout.tensor_size)
        return shard

    def _master(self, parameter: torch.nn.Parameter, stored: StoredParameter) -> torch.Tensor:
        """The tensor that the inner optimizer updates: the parameter's master, or this rank's flat group."""
        stage = self._layout.stage
        if stage == 0:
            master: torch.Tensor = self._optimizer.master_of(parameter)
        elif stage == 3:
            master = self._optimizer.fp32_partitioned_groups_flat[stored.group]
        else:
            master = self._optimizer.single_partition_of_fp32_groups[stored.group]
        return master.data

    def _pieces(
        self,
        full: torch.Tensor,
        parameter: torch.nn.Parameter,
        stored: StoredParameter,
        of: torch.Tensor | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (view of this rank's master, its values from `full`); `of` replaces the master."""
        if self._layout.stage == 0:
            if stored.group != NOWHERE or of is not None:
                yield (self._master(parameter, stored) if of is None else of), full
            return
        flat, values = self._master(parameter, stored) if of is None else of, full.reshape(-1)
        for piece in self._layout.fragments(self._part, stored):
            if piece.data_rank == self._grid.data_rank:
                yield part_of(flat, piece), values.narrow(0, piece.start, piece.numel)


def _copy_partition(full: torch.Tensor, parameter: Any, data_rank: int) -> None:
    """Copy this rank's part of a frozen ZeRO 3 parameter; the last rank's part is padded."""
    partition = parameter.ds_tensor.data.view(-1)
    start = data_rank * partition.numel()
    values = full.reshape(-1)[start : start + partition.numel()]
    partition[: values.numel()].copy_(values)


def _refresh_partitions(optimizer: Any) -> None:
    """Update ZeRO 3's half-precision partitions from their masters."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        flat = optimizer.fp16_partitioned_groups_flat[number]
        flat.data.copy_(master.data)
        pieces = optimizer.unflatten(flat, optimizer.fp16_partitioned_groups[number])
        for partition, piece in zip(optimizer.fp16_partitioned_groups[number], pieces, strict=True):
            partition.data = piece.data


def _load_counters(engine: Any, header: dict[str, Any]) -> None:
    """Restore scheduler and counters, as the engine's loader does."""
    state, scheduler = header.get("lr_scheduler"), engine.lr_scheduler
    if isinstance(scheduler, LRScheduler) or (scheduler is not None and state is not None):
        scheduler.load_state_dict(state)  # ours rejects a checkpoint without a schedule
    engine.global_steps = header["global_steps"]
    engine.global_samples = header["global_samples"]
    engine.skipped_steps = header["skipped_steps"]


def _first_places(layout: Layout) -> dict[str, StoredParameter]:
    found: dict[str, StoredParameter] = {}
    for part in layout.slices:
        for stored in part.parameters:
            found.setdefault(stored.name, stored)
    return found


def _full_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, stored in _first_places(layout).items():
        shape = list(stored.shape)
        if stored.cut is not None:
            shape[stored.cut["dim"]] = sum(stored.cut["parts"])
        shapes[name] = tuple(reversed(shape)) if stored.is_transposed else tuple(shape)
    return shapes
