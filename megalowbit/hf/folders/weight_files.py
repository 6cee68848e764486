"""The weight files of a Hugging Face folder that transformers would read, and their dtypes, without the
values.

transformers casts every stored tensor to the requested dtype, even an int8 one, whose scale is then lost. It
follows an index to any path, loads tensors that the index does not name, and if two files contain the same
tensor, uses the last one. Therefore the files are found here first, in transformers' order of preference (one
safetensors file, safetensors by an index, then pickles in the same order), and compared with their index.

Not read: variants (`model.fp16.safetensors`), GGUF, adapters, distributed checkpoints of transformers.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import safe_open

from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_json_object, refuse_irregular_files

INDEX = ".index.json"
SAFETENSORS = ".safetensors"
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER = "adapter_config.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers prefers these
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
NAMES_SHOWN = 3
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFiles(NamedTuple):
    """The files of one set of weights.

    Attributes:
        paths: all files that are read.
        index_file: the index that names them; None for a single file.
        weight_map: the file of each tensor according to the index, relative to the folder.
    """

    paths: tuple[Path, ...]
    index_file: Path | None = None
    weight_map: Mapping[str, str] = MappingProxyType({})

    @property
    def is_safetensors(self) -> bool:
        """Whether they are safetensors; otherwise they are pickles."""
        return self.paths[0].name.endswith(SAFETENSORS)


def find_weight_files(folder: Path) -> WeightFiles:
    """The files that transformers reads from `folder`.

    Raises:
        UserError: there are no supported files; an index is damaged, or names a file that is missing or
            outside the folder; the folder contains an adapter, a distributed checkpoint, or a FIFO.
    """
    refuse_irregular_files("checkpoint", folder)
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER}), not a full model: merge it into its base and save that"
        )
    for path in sorted(folder.iterdir()):
        if DISTRIBUTED.fullmatch(path.name):
            raise UserError(
                f"{folder} holds a distributed checkpoint ({path.name}): save it as model.safetensors"
            )
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    if name is None:
        others = sorted({path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)})
        found = f"; {', '.join(others[:NAMES_SHOWN])} is not read" if others else ""
        raise UserError(f"{folder} has no weights: add {NAMES[0]} or {NAMES[1]}{found}")
    if not name.endswith(INDEX):
        return WeightFiles((folder / name,))
    weight_map = _weight_map(folder / name)
    paths = tuple(_inside(folder, file, folder / name) for file in sorted(set(weight_map.values())))
    return WeightFiles(paths, folder / name, weight_map)


class StoredTensor(NamedTuple):
    """A tensor in a file: its dtype (safetensors' name if torch has none), its shape, and the file."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    path: Path


def stored_tensors(files: WeightFiles) -> dict[str, StoredTensor]:
    """All tensors by name; their values are not read.

    Raises:
        UserError: files and index differ, two files contain the same tensor, or a pickle contains other
            objects.
        Exception: of many kinds, if a file is damaged.
    """
    found: dict[str, StoredTensor] = {}
    places: dict[str, str] = {}
    for path in files.paths:
        place = (
            path.name if files.index_file is None else path.relative_to(files.index_file.parent).as_posix()
        )
        for name, tensor in _tensors(path):
            if name in places:
                raise UserError(
                    f"{path.parent}: {places[name]} and {place} both hold the weight {name}: replace them"
                )
            found[name], places[name] = tensor, place
    if files.index_file is not None:
        _refuse_other_places(files.index_file, files.weight_map, places)
    return found


def stored_dtypes(files: WeightFiles) -> dict[str, torch.dtype | str]:
    """The dtypes of `stored_tensors`."""
    return {name: tensor.dtype for name, tensor in stored_tensors(files).items()}


def _refuse_other_places(index: Path, named: Mapping[str, str], places: dict[str, str]) -> None:
    for name in sorted(named.keys() | places.keys()):
        if name not in named:
            raise UserError(
                f"{index} does not name the weight {name}, which {places[name]} holds: replace the folder"
            )
        if name not in places or places[name] != PurePosixPath(named[name]).as_posix():
            where = f"it is in {places[name]}" if name in places else "it is in none of the files"
            raise UserError(
                f"{index} names {named[name]} for the weight {name}, but {where}: replace the folder"
            )


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise UserError(
            f'{index} is not an index of weights: it lacks "weight_map" or "metadata"; replace the folder'
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise UserError(f"{index} names {shown(file)} for the weight {name}, no file: replace the folder")
    return weight_map


def _inside(folder: Path, name: str, index: Path) -> Path:
    """The file that an index names, if it is in the folder or in the folder's Hugging Face cache."""
    pure, said = PurePosixPath(name), f"{index} names {shown(name)}"
    if pure.is_absolute() or ".." in pure.parts:
        raise UserError(f"{said}, which leads out of its folder: replace the folder")
    if name.endswith(SAFETENSORS) is not index.name.endswith(SAFETENSORS + INDEX):
        raise UserError(f"{said}, a file of another kind: replace the folder")
    path = folder / pure
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # the name is too long, or contains a NUL
        is_there = False
    if not is_there:
        raise UserError(f"{said}, which does not exist: complete the folder")
    home, target = folder.resolve(), path.resolve()
    # models--gpt2/snapshots/<revision>/model.safetensors -> ../../blobs/<digest>
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (home, *blobs)):
        raise UserError(f"{said}, a link out of its folder to {target}: put the file itself there")
    return path


def _tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    if path.name.endswith(SAFETENSORS):
        with safe_open(path, "pt") as file:  # maps it into memory
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                yield name, StoredTensor(DTYPES.get(dtype, dtype), tuple(tensor.get_shape()), path)
        return
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to load it with code execution
        raise UserError(
            f"{path} is not loaded: it is damaged, or contains objects other than tensors, which could "
            "execute code: save the model as safetensors"
        ) from error
    items = content.items() if isinstance(content, dict) else [("", content)]
    for name, value in items:
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"{path} holds {name or 'a'} {type(value).__name__} instead of a tensor: "
                "save only the model's state dict"
            )
        if value.layout is not torch.strided or value.is_quantized:
            raise UserError(f"{path} holds {name} as a sparse or quantised tensor: save it as a dense one")
        yield name, StoredTensor(value.dtype, tuple(value.shape), path)
