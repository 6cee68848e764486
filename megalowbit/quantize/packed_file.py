"""Saves quantised tensors to a safetensors file, bit for bit, and loads them.

A tensor `name` is stored as `name.codes`, `name.scales` (if its format has block scales) and
`name.tensor_scale` (if its format has one), each in its dtype. The file's metadata has shape, dtype and
format as JSON under `megalowbit`, and a checksum of that text and all numbers under `megalowbit.sha256`. The
checksum detects damage, not forgery. Any safetensors reader can read the numbers; E8M0 scales need
safetensors 0.5. Counts and operands are not saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError, shown
from megalowbit.formats.block_format import SCALE_DTYPES, BlockFormat, ScaleKind
from megalowbit.formats.block_scale import MAX_POWER_OF_TWO
from megalowbit.formats.element import E2M1, E4M3, E5M2, ELEMENTS, INT8_E5M2, S1P2
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape

METADATA_KEY = "megalowbit"
CHECKSUM_KEY = "megalowbit.sha256"
VERSION = 1
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
# Elements that can be combined with a kind of scale. Other pairs could be decoded, but no quantizer makes
# them.
PAIRS: dict[ScaleKind, tuple[str, ...]] = {
    "e4m3": (E2M1.name,),
    "ue5m3": (E2M1.name,),
    "hif4": (S1P2.name,),
    "e8m0": (E2M1.name, E4M3.name, E5M2.name),
    "fp32": tuple(name for name in ELEMENTS if name not in (INT8_E5M2.name, S1P2.name)),
    "signed_fp32": (INT8_E5M2.name,),
}
LARGEST_SIZE = 2**63 - 1  # of a dimension, and of all elements together


def save_quantized(tensors: Mapping[str, QuantizedTensor], path: str | os.PathLike[str]) -> None:
    """Write quantised tensors to one file, atomically.

    Args:
        tensors: name → tensor.
        path: the file, in an existing folder; an existing file is replaced.

    Raises:
        UserError: a tensor is not packed or is on the meta device, a name is invalid, or the path cannot be
            written. An existing file is kept in that case.
    """
    if not isinstance(tensors, Mapping):
        raise _wrong_call(f"tensors by name first, not {type(tensors).__name__}")
    path = _path(path)
    stored: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        _check(path, name, tensor)
        for suffix, part in _parts(tensor).items():
            # a copy, because `save` rejects tensors that share memory
            stored[f"{name}.{suffix}"] = part.detach().cpu().clone(memory_format=torch.contiguous_format)
        described[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "element": tensor.format.element.name,
            "block": tensor.format.block,
            "scale": tensor.format.scale,
            **({"row_scales": True} if tensor.format.has_row_scales else {}),
        }
    text = json.dumps({"version": VERSION, "tensors": described})
    content = save(stored, {METADATA_KEY: text, CHECKSUM_KEY: _checksum(text, stored)})
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file in it")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written, folder {path.parent} does not exist: create it first")
    try:
        with atomic_file(path, "wb") as file:
            file.write(content)
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        # `strerror`, because the error itself names the temporary file of `atomic_file`
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be written ({reason}): give another path") from error


def load_quantized(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu"
) -> dict[str, QuantizedTensor]:
    """Read a file written by `save_quantized`.

    Args:
        path: the file.
        device: device of the result.

    Raises:
        UserError: the file does not exist, is damaged or of another kind, or the device cannot be used.
    """
    path = _path(path)
    _check_device(device)
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file in it, written by save_quantized")
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a file written by save_quantized")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}): write it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check permissions") from error
    try:
        described = _described(path, metadata)
        found = _checksum(metadata[METADATA_KEY], stored)
        loaded = {name: _tensor(path, name, entry, stored) for name, entry in described.items()}
    except RecursionError as error:  # JSON nested too deeply
        raise UserError(f"{path} is damaged: its metadata cannot be read; write it again") from error
    if stored:
        raise UserError(f"{path} contains {shown(min(stored))} without a description: write it again")
    # checked last, because the errors above are more specific
    if metadata.get(CHECKSUM_KEY) != found:
        raise UserError(f"{path} is damaged: its SHA-256 does not match its content; write it again")
    return {
        name: tensor.from_parts(tuple(part.to(device) for part in tensor.to_parts()[0]))
        for name, tensor in loaded.items()
    }


def _wrong_call(what: str) -> UserError:
    return UserError(f'save_quantized takes {what}: write save_quantized({{"x": packed}}, "x.safetensors")')


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        what = f"{shown(path)} is {type(path).__name__}, not a path"
        raise UserError(
            f'{what}: write save_quantized({{"x": packed}}, "x.safetensors"), then load_quantized'
        )
    return Path(path)


def _check(path: Path, name: Any, tensor: Any) -> None:
    """Reject names and tensors that cannot be saved."""
    if not isinstance(name, str):
        raise _wrong_call(f"names that are strings, not {shown(name)}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: the name {shown(name)} is not valid text: rename that tensor") from error
    if isinstance(tensor, UnquantizedTensor):
        raise UserError(f"{path}: {name!r} is not packed: save its .dequantize() with safetensors")
    if not isinstance(tensor, QuantizedTensor):
        kind = type(tensor).__name__
        raise UserError(f"{path}: {name!r} is not packed ({kind}): quantise it, or save it with safetensors")
    if any(part.is_meta for part in _parts(tensor).values()):
        raise UserError(f"{path}: {name!r} is on the meta device, without numbers: quantise it elsewhere")


def _check_device(device: Any) -> None:
    """Check the device before reading, to keep its errors apart from those of the file."""
    try:
        is_meta = torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # depends on the device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(f"device {shown(device)} cannot be used ({shown(reason)}): use another") from error
    if is_meta:
        raise UserError(f"device {shown(device)} stores no numbers: use another")


def _checksum(text: str, stored: Mapping[str, Tensor]) -> str:
    """Hexadecimal SHA-256 of the description, then of the bytes of the tensors, sorted by name."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(stored):
        digest.update(stored[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(tensor: QuantizedTensor) -> dict[str, Tensor]:
    parts = {"codes": tensor.codes}
    if tensor.format.block is not None:
        parts["scales"] = tensor.scales
    if tensor.tensor_scale is not None:
        parts["tensor_scale"] = tensor.tensor_scale
    return parts


def _described(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if METADATA_KEY not in metadata:
        raise UserError(f"{path} contains no packed tensors: give a file written by save_quantized")
    try:
        content = json.loads(metadata[METADATA_KEY])
        version, tensors = content["version"], content["tensors"]
        if not isinstance(tensors, dict):
            raise TypeError(f"tensors are {type(tensors).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: its metadata cannot be read; write it again") from error
    if type(version) is not int or version != VERSION:  # True == 1
        raise UserError(
            f"{path} has version {shown(version)}, not {VERSION}: load it with the megalowbit that wrote it"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, stored: dict[str, Tensor]) -> QuantizedTensor:
    """Build a tensor from its parts, which are removed from `stored`."""
    format, shape, dtype = _format(path, name, entry)
    rows, cols = matrix_shape(shape)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    expected["codes"] = torch.uint8, format.codes_shape(rows, cols)
    if format.block is not None:
        expected["scales"] = SCALE_DTYPES[format.scale], format.scales_shape(rows, cols)
    above = format.tensor_scale_shape(rows)
    if above is not None:
        expected["tensor_scale"] = torch.float32, above
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
        # empty if the tensor has only one scale
        scales=parts.get("scales", parts["codes"].new_empty((0, 0), dtype=torch.float32)),
        tensor_scale=parts.get("tensor_scale"),
        shape=shape,
        dtype=dtype,
        format=format,
        is_power_of_two=_has_exact_scale(format, parts.get("tensor_scale")),
    )


def _has_exact_scale(format: BlockFormat, tensor_scale: Tensor | None) -> bool:
    """Whether operands are exact with the tensor scale, which files of other libraries do not say."""
    if format.scale != "e4m3" or tensor_scale is None:
        return False
    is_power = torch.frexp(tensor_scale).mantissa == 0.5
    return bool((is_power & (tensor_scale >= 1 / MAX_POWER_OF_TWO)).all())


def _format(path: Path, name: str, entry: Any) -> tuple[BlockFormat, torch.Size, torch.dtype]:
    """Parse an entry of the metadata; accepts only what `save_quantized` writes."""
    try:
        element, scale, block = ELEMENTS[entry["element"]], entry["scale"], entry["block"]
        dtype, shape, has_row_scales = DTYPES[entry["dtype"]], entry["shape"], "row_scales" in entry
        is_sound = element.name in PAIRS[scale] and _are_sizes(shape) and math.prod(shape) <= LARGEST_SIZE
    except (KeyError, TypeError) as error:
        raise _unreadable(path, name, entry) from error
    is_sound = is_sound and (not has_row_scales or (scale == "e4m3" and entry["row_scales"] is True))
    if block is None:
        is_sound = is_sound and scale == "fp32"
    else:
        is_sound = is_sound and _are_sizes(block) and len(block) == 2 and all(map(_is_power_of_two, block))
        is_sound = is_sound and (not (scale == "signed_fp32" or has_row_scales) or block[0] == 1)
        is_sound = is_sound and (scale != "hif4" or block == [1, 64])
        block = tuple(block) if is_sound else None
    if not is_sound:
        raise _unreadable(path, name, entry)
    format = BlockFormat(element=element, block=block, scale=scale, has_row_scales=has_row_scales)
    return format, torch.Size(shape), dtype


def _are_sizes(value: Any) -> bool:
    """Whether this is a list of sizes; `True` and 1.0 are not sizes."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in value)


def _is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def _unreadable(path: Path, name: str, entry: Any) -> UserError:
    return UserError(f"{path} is damaged: {name!r} is described as {shown(entry)}; write it again")
