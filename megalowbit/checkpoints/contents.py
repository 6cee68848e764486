"""Reads a checkpoint of any ZeRO stage and number of processes as full tensors, by name.

`CheckpointContents` joins the slices that `shards` reads: tensor-parallel shards along their sharded axis,
pipeline stages by parameter name. It needs neither DeepSpeed nor a process group, and holds one parameter in
memory at a time. `layout` defines the names and what is stored for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megalowbit.checkpoints.layout import (
    ENGINE_KEY,
    FORMAT,
    LAYOUT_KEY,
    NOWHERE,
    RANK_FILES_KEY,
    Layout,
    StoredParameter,
)
from megalowbit.checkpoints.shards import (
    KEPT_BYTES,
    Shards,
    check_origin,
    files_of,
    is_moment,
    load_file,
    model_file,
    reading,
)
from megalowbit.durable_files import MANIFEST, read_manifest
from megalowbit.errors import UserError, shown

FIRST_FILES = (model_file(0, 0), model_file(3, 0))  # stages 0 to 2, and 3


def header_file(folder: Path) -> Path:
    """The file of a checkpoint that describes the others; a checkpoint without it is rejected."""
    for name in FIRST_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"checkpoint {folder} has neither {' nor '.join(FIRST_FILES)}: name another")


def check_files(folder: Path, *, remedy: str, step: int | None = None) -> None:
    """Check that a verified checkpoint has every file that its layout needs, and the expected step.

    `remedy` is appended to the messages.

    Raises:
        UserError: the checkpoint is damaged: its manifest lacks a file, or its header is inconsistent.
    """
    names = {entry.name for entry in read_manifest(folder, remedy=remedy)}
    header = header_file(folder)
    needed = [header.name]
    if header.name in names:
        with reading(f"checkpoint {folder}"):
            content = load_file(header)
            own = content.get(ENGINE_KEY)
            if isinstance(own, dict):
                check_header(content, header)
                if step is not None and own.get("step", step) != step:
                    raise UserError(
                        f"checkpoint {folder} is damaged: it was saved at step {own['step']}; {remedy}"
                    )
                needed += own.get(RANK_FILES_KEY, [])
                saved = own.get(LAYOUT_KEY)
                if isinstance(saved, dict) and saved.get("format") == FORMAT:  # another version is not damage
                    needed += files_of(Layout.from_dict(saved, where=str(folder)))
    for name in needed:
        if name not in names:
            raise UserError(f"checkpoint {folder} is damaged: {MANIFEST} does not name {name}; {remedy}")


def check_header(content: Mapping[str, Any], path: Path) -> None:
    """Reject a header whose values have other types than an engine writes."""
    own = content[ENGINE_KEY]
    check_origin(content, path, own.get("step"))
    for key, is_right in OWN_KINDS.items():
        if key in own and not is_right(own[key]):
            raise UserError(f"{path}: {key} is {shown(own[key])}: use an older checkpoint")
    if own.get("format") is None:
        return  # written by another program, which stores only a layout
    missing = [key for key in ("step", "client_keys", "random_states") if key not in own]
    missing += [key for key in own.get("client_keys", ()) if key not in content]
    if missing:
        raise UserError(f"{path} lacks {shown(missing[0])}: use an older checkpoint")
    for key in COUNTERS:
        if key not in content or not _is_count(content[key]):
            raise UserError(f"{path}: {key} is {shown(content.get(key))}: use an older checkpoint")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_mapping_or_none(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


COUNTERS = ("global_steps", "global_samples", "skipped_steps")
OWN_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "client_keys": _are_texts,
    RANK_FILES_KEY: _are_texts,
    "random_states": lambda value: (
        isinstance(value, list)
        or (isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 2)
    ),
    "grad_scaler": _is_mapping_or_none,
    "optimizer": lambda value: value is None or isinstance(value, str),
    "recipe": lambda value: value is None or isinstance(value, str),
    LAYOUT_KEY: _is_mapping_or_none,
}


class CheckpointContents:
    """The contents of a verified checkpoint, by name.

    Attributes:
        layout: how it was saved; None if it has only weights, or was written before layouts existed.
        header: counters, scheduler and client state.

    Args:
        folder: the checkpoint.
        kept_bytes: limit of the memory of mapped pages, if no tensor has more.

    Raises:
        UserError: megalowbit did not write the checkpoint, or it is inconsistent.
    """

    def __init__(self, folder: Path, *, kept_bytes: int = KEPT_BYTES) -> None:
        self.folder = folder
        names = frozenset(entry.name for entry in read_manifest(folder, remedy="use an older checkpoint"))
        first = header_file(folder)
        if first.name not in names:
            raise UserError(f"checkpoint {folder}: {MANIFEST} does not name {first.name}: use another")
        self.header = load_file(first)
        own = self.header.get(ENGINE_KEY)
        if isinstance(own, dict):
            check_header(self.header, first)
        saved = own.get(LAYOUT_KEY) if isinstance(own, dict) else None
        step = own.get("step") if isinstance(own, dict) else None
        self.layout = None if saved is None else Layout.from_dict(saved, where=str(folder))
        self._shards = (
            None if self.layout is None else Shards(folder, self.layout, names, step, kept_bytes=kept_bytes)
        )
        self._places: dict[str, list[tuple[int, StoredParameter]]] = {}
        for index, part in enumerate(self.layout.slices if self.layout else ()):
            for stored in part.parameters:
                self._places.setdefault(stored.name, []).append((index, stored))
        if self.layout is None and not isinstance(self.header.get("module"), dict):
            raise UserError(f"checkpoint {folder} was not written by megalowbit: it has no layout")
        if self.layout is None and model_file(0, 1) in names:
            raise UserError(f"checkpoint {folder} has shards and no layout: join them with its version first")
        self._check_slices()

    def parameters(self) -> list[str]:
        """Names of all parameters, each once."""
        return list(self._places)

    def names(self) -> list[str]:
        """Names of the state dict: parameters under all their names, and buffers."""
        if self.layout is None:
            return list(self.header["module"])
        return [*self._places, *self.layout.tied, *self._buffers()]

    def weight(self, name: str, *, as_stored: bool = False) -> torch.Tensor:
        """A full parameter or buffer, by one of `names`; the fp32 master if there is one.

        With `as_stored` it has the dtype of the model's weights instead.

        Raises:
            UserError: the checkpoint has no such parameter, or its files contradict its layout.
        """
        if self.layout is None:
            # read again, because the pages of a mapped file stay in memory as long as it is open
            value: torch.Tensor = load_file(header_file(self.folder))["module"][name]
            return value
        if name in self._buffers():
            return self._files.buffer(self._buffers()[name], name)
        places = self._places_of(name)
        full = _join(places, [self._files.weight(index, stored) for index, stored in self._needed(places)])
        return full.to(self.dtype(name)) if as_stored else full

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `weight` with `as_stored`, by one of `names`."""
        if self.layout is None or name in self._buffers():
            return self.weight(name).dtype
        stored = self._places_of(name)[0][1].dtype
        dtype = getattr(torch, stored, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"checkpoint {self.folder}: {name} has the dtype {shown(stored)}: use another")
        return dtype

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """A parameter's moments, as full fp32 tensors, and step counts; empty before the first step."""
        places = self._places_of(name)
        states = [self._files.state(index, stored) for index, stored in self._needed(places)]
        return {
            key: _join(places, [state[key] for state in states]) if is_moment(value) else value
            for key, value in states[0].items()
        }

    def hyper_parameters(self, name: str) -> dict[str, Any]:
        """Hyper-parameters of the group that trained a parameter; empty for a frozen one."""
        index, stored = self._places_of(name)[0]
        return {} if stored.state == NOWHERE else self._files.hyper_parameters(index, stored)

    @property
    def _files(self) -> Shards:
        if self._shards is None:
            raise UserError(
                f"checkpoint {self.folder} has no layout, so only its weights can be read: "
                "start from it with megalowbit.model.checkpoint"
            )
        return self._shards

    def _buffers(self) -> dict[str, int]:
        """Buffer name → index of its slice."""
        found: dict[str, int] = {}
        for index, part in enumerate(self.layout.slices if self.layout else ()):
            for name in part.buffers:
                found.setdefault(name, index)
        return found

    def _places_of(self, name: str) -> list[tuple[int, StoredParameter]]:
        layout = self._files.layout
        name = layout.tied.get(name, name)
        if name not in self._places:
            raise UserError(
                f"checkpoint {self.folder} has no parameter {name}: use the model it was saved from"
            )
        return self._places[name]

    def _needed(self, places: list[tuple[int, StoredParameter]]) -> list[tuple[int, StoredParameter]]:
        """All shards of a sharded parameter; the first copy of a replicated one."""
        self._files.layout.check_sharding(places[0][1], f"checkpoint {self.folder}")
        return places if places[0][1].cut is not None else places[:1]

    def _check_slices(self) -> None:
        """Check that no shard is missing and that copies have the same shape."""
        for name, places in self._places.items():
            assert self.layout is not None
            first = places[0][1]
            is_complete = first.cut is None or len(places) == self.layout.tensor_size
            if not is_complete or any(
                (each.cut, each.shape) != (first.cut, first.shape) for _, each in places
            ):
                raise UserError(
                    f"checkpoint {self.folder}: the shards of {name} cannot be joined: use another"
                )


class StateDict(Mapping[str, torch.Tensor]):
    """The state dict of a checkpoint's model. Each access reads the tensor; nothing is kept.

    For `as_stored`, see `CheckpointContents.weight`.
    """

    def __init__(self, contents: CheckpointContents, *, as_stored: bool = False) -> None:
        self._contents, self._as_stored = contents, as_stored
        self._names = dict.fromkeys(contents.names())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        with reading(f"checkpoint {self._contents.folder}"):
            value = self._contents.weight(name, as_stored=self._as_stored)
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"{name} is no dense tensor")
        return value

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor with `as_stored`; it is not read."""
        with reading(f"checkpoint {self._contents.folder}"):
            return self._contents.dtype(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _join(places: list[tuple[int, StoredParameter]], shards: list[torch.Tensor]) -> torch.Tensor:
    """Join shards to the full tensor, in the orientation of the unsharded module."""
    first, full = places[0][1], shards[0]
    if first.cut is not None:
        from megalowbit.layers.tensor_parallel.linear import Sharding

        full = Sharding(dim=first.cut["dim"], parts=tuple(first.cut["parts"])).join(shards)
    return full.t().contiguous() if first.is_transposed else full
