"""Reads DeepSpeed's universal checkpoints, which hold one folder per parameter: `zero/<name>/fp32.pt`.

DeepSpeed joins the shards when it writes them (`ds_to_universal.py`), whatever the number of ranks was, and
removes the padding of the vocabulary if the program told it the size. From ZeRO 3 it writes flat tensors with
the padding of the last rank; the shapes are then in the copies of the model's files. Frozen parameters are in
these copies only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalowbit.checkpoints.shards import reading
from megalowbit.errors import UserError
from megalowbit.hf.importers.base import (
    ForeignModel,
    LazyTensor,
    LazyWeights,
    entries,
    file_tensor,
    numel_of,
    require_config,
    shape_of,
)
from megalowbit.hf.importers.deepspeed import (
    check_headers,
    model_files_in,
    refuse_mixed_masters,
    with_model_weights,
    without_wrapper_prefixes,
)
from megalowbit.hf.importers.inert_files import read_inert

ZERO, MASTER, PARAM = "zero", "fp32.pt", "param"


def is_universal(folder: Path) -> bool:
    """Whether a step's folder is a universal checkpoint."""
    return (folder / ZERO).is_dir()


def read_universal(folder: Path, config: Mapping[str, Any] | None) -> ForeignModel:
    """The model in a universal checkpoint.

    Args:
        folder: contains `zero/`.
        config: fields of the Hugging Face configuration.

    Raises:
        UserError: no configuration was named; a file is missing or damaged.
    """
    where = f"checkpoint {folder}"
    hf_config = require_config(config, where)
    with reading(where):
        headers = _headers(folder)
        groups = headers[0].get("param_shapes") or [] if headers else []
        shapes = {name: shape_of(shape, name) for group in groups for name, shape in group.items()}
        # beside the folders of parameters lies one file, optimizer_state.pt
        names = [name for name in entries(folder / ZERO) if (folder / ZERO / name).is_dir()]
        stored = {name: _master(folder / ZERO / name, shapes.get(name)) for name in names}
        for name in shapes.keys() - stored.keys():
            raise UserError(f"{where} lacks {ZERO}/{name}/{MASTER}: convert the checkpoint again")
        refuse_mixed_masters(stored, folder)
        stored = with_model_weights(stored, headers, folder) if headers else stored
        step = headers[0].get("global_steps") if headers else "unknown"
        description = f"DeepSpeed, universal, step {step}, fp32 masters"
        paths = [folder / name for name in model_files_in(folder).values()]
        paths += [folder / ZERO / name / MASTER for name in names]
        return ForeignModel(hf_config, LazyWeights(without_wrapper_prefixes(stored)), paths, description)


def _headers(folder: Path) -> list[Mapping[str, Any]]:
    """The copies of the model's files, by data-parallel rank; none if there are none."""
    files = model_files_in(folder)
    headers = [read_inert(folder / name) for name in files.values()]
    if headers:
        check_headers(folder, headers, list(files.values()))
    return headers


def _master(folder: Path, shape: tuple[int, ...] | None) -> LazyTensor:
    """The joined master in a parameter's folder."""
    path = folder / MASTER
    if not path.is_file():
        raise UserError(f"{path} is missing: convert the checkpoint again with ds_to_universal.py")
    value = read_inert(path, is_dictionary=False)
    value = value.get(PARAM) if isinstance(value, Mapping) else value
    tensor = file_tensor(value, str(path))
    if shape is None or tensor.shape == shape or len(tensor.shape) != 1 or not tensor.is_contiguous:
        return LazyTensor.of(tensor)
    if tensor.numel() < numel_of(shape):
        raise UserError(f"{path} holds {tensor.numel():,} elements, its parameter has {numel_of(shape):,}")
    return LazyTensor.concatenated([tensor], shape)
