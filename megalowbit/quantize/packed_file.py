"""Quantised tensors in a safetensors file, bit for bit as they were.

A tensor `name` becomes `name.codes`, `name.scales` (where its format has block scales) and
`name.tensor_scale` (where it has one), in their own dtypes; shape, dtype and format stand as JSON in the
file's metadata under `megalowbit`. Any safetensors reader gets at the numbers; E8M0 scales need safetensors
0.5. Counts and operands are not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megalowbit.durable import atomic_file
from megalowbit.errors import UserError, shown
from megalowbit.formats.block_format import SCALE_DTYPES, BlockFormat, ScaleKind
from megalowbit.formats.element import ELEMENTS
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape

METADATA_KEY = "megalowbit"
VERSION = 1
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def save_quantized(path: str | Path, tensors: Mapping[str, QuantizedTensor]) -> None:
    """Write quantised tensors to one file, wholly or not at all.

    Args:
        path: in a folder that exists; a file there is replaced.
        tensors: by name.

    Raises:
        UserError: a tensor is not packed; nothing is written then.
    """
    stored: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, QuantizedTensor):
            raise UserError(f"{path}: {name!r} is not packed ({type(tensor).__name__}): save it as it is")
        for suffix, part in _parts(tensor).items():
            stored[f"{name}.{suffix}"] = part.detach().cpu().contiguous()
        described[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "element": tensor.format.element.name,
            "block": tensor.format.block,
            "scale": tensor.format.scale,
        }
    metadata = {METADATA_KEY: json.dumps({"version": VERSION, "tensors": described})}
    # `save` refuses tensors that share memory
    content = save({name: part.clone() for name, part in stored.items()}, metadata)
    with atomic_file(Path(path), "wb") as file:
        file.write(content)


def load_quantized(path: str | Path, *, device: str | torch.device = "cpu") -> dict[str, QuantizedTensor]:
    """Read what `save_quantized` wrote.

    Args:
        path: the file.
        device: where the tensors go.

    Raises:
        UserError: there is no such file, it is damaged or not one of these, or a tensor is missing or not of
            the shape and dtype that its description asks for.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a file written by save_quantized")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}): write it again") from error
    described = _described(path, metadata)
    loaded = {name: _tensor(path, name, entry, stored) for name, entry in described.items()}
    if stored:
        raise UserError(f"{path} holds {shown(min(stored))}, which nothing describes: write it again")
    return loaded


def _parts(tensor: QuantizedTensor) -> dict[str, Tensor]:
    parts = {"codes": tensor.codes}
    if tensor.format.block is not None:
        parts["scales"] = tensor.scales
    if tensor.tensor_scale is not None:
        parts["tensor_scale"] = tensor.tensor_scale
    return parts


def _described(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if METADATA_KEY not in metadata:
        raise UserError(f"{path} holds no packed tensors: give a file written by save_quantized")
    try:
        content = json.loads(metadata[METADATA_KEY])
        version, tensors = content["version"], dict(content["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: its metadata cannot be read; write it again") from error
    if version != VERSION:
        raise UserError(f"{path} has version {shown(version)}, not {VERSION}: use its megalowbit")
    return tensors


def _tensor(path: Path, name: str, entry: Any, stored: dict[str, Tensor]) -> QuantizedTensor:
    """Take a tensor's parts out of `stored`."""
    format, shape, dtype = _format(path, name, entry)
    rows, cols = matrix_shape(shape)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    expected["codes"] = torch.uint8, format.codes_shape(rows, cols)
    if format.block is not None:
        expected["scales"] = SCALE_DTYPES[format.scale], format.scales_shape(rows, cols)
    if format.scale == "e4m3" or format.block is None:
        expected["tensor_scale"] = torch.float32, ()
    parts = {}
    for suffix, (part_dtype, part_shape) in expected.items():
        part = stored.pop(f"{name}.{suffix}", None)
        if part is None:
            raise UserError(f"{path} is damaged: '{name}.{suffix}' is missing; write it again")
        if part.dtype != part_dtype or part.shape != part_shape:
            raise UserError(
                f"{path} is damaged: '{name}.{suffix}' is {part.dtype} {tuple(part.shape)} instead of "
                f"{part_dtype} {part_shape}; write it again"
            )
        parts[suffix] = part
    return QuantizedTensor(
        codes=parts["codes"],
        # where a tensor has only one scale
        scales=parts.get("scales", parts["codes"].new_empty((0, 0), dtype=torch.float32)),
        tensor_scale=parts.get("tensor_scale"),
        shape=shape,
        dtype=dtype,
        format=format,
    )


def _format(path: Path, name: str, entry: Any) -> tuple[BlockFormat, torch.Size, torch.dtype]:
    try:
        element, scale, block = ELEMENTS[entry["element"]], entry["scale"], entry["block"]
        dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        is_sound = scale in get_args(ScaleKind) and all(size >= 0 for size in shape)
        if block is not None:
            block = tuple(int(size) for size in block)
            is_sound = is_sound and len(block) == 2 and all(_is_power_of_two(size) for size in block)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, name, entry) from error
    if not is_sound or math.prod(shape) >= 2**63:
        raise _unreadable(path, name, entry)
    return BlockFormat(element=element, block=block, scale=scale), shape, dtype


def _is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def _unreadable(path: Path, name: str, entry: Any) -> UserError:
    return UserError(f"{path} is damaged: {name!r} is described as {shown(entry)}; write it again")
