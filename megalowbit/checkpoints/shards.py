"""Reads the tensors of one slice from a checkpoint's files, assembling one parameter at a time.

Files are memory-mapped, so a tensor uses memory only while it is in use. Nothing in them is executed
(`weights_only`). File names are DeepSpeed's:

- `mp_rank_01_model_states.pt`: weights of slice 1, and its optimizer at stage 0
- `zero_pp_rank_3_mp_rank_01_optim_states.pt`: masters and moments of slice 1 on data-parallel rank 3

Weights of a checkpoint to start from are in safetensors files, which are written tensor by tensor.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from megalowbit.checkpoints.layout import NOWHERE, Fragment, Layout, StoredParameter
from megalowbit.errors import UserError, file_system_error, shown

FLAT_KEYS = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_flat_groups",
}
INNER_KEYS = MappingProxyType(
    {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
)
MASTERS_KEY = "fp32_from_fp16_params"
FROZEN_KEY = "frozen_param_fragments"
SAFETENSORS = ".safetensors"
KEPT_BYTES = 2**30  # opening the files of many ranks again takes longer than reading some megabytes
ORIGIN_KEY = "megalowbit_origin"  # the result of `origin_of`, stored in the file itself
UNSAFE_FILE = (
    "it holds objects that only the program that wrote it can create ({}): it was not written by this "
    "version of megalowbit; start from its weights instead"
)


def model_file(stage: int, slice_index: int, data_rank: int = 0) -> str:
    """Name of the file with a slice's weights and counters; at stage 3, one per data-parallel rank."""
    prefix = f"zero_pp_rank_{data_rank}_" if stage == 3 else ""
    return f"{prefix}mp_rank_{slice_index:02d}_model_states.pt"


def optimizer_file(slice_index: int, data_rank: int) -> str:
    """Name of the file with a data-parallel rank's masters and moments of a slice, stages 1 to 3."""
    return f"zero_pp_rank_{data_rank}_mp_rank_{slice_index:02d}_optim_states.pt"


def files_of(layout: Layout) -> list[str]:
    """Names of all files that a checkpoint of this layout needs."""
    names: dict[str, None] = {}
    for index, part in enumerate(layout.slices):
        for rank in range(layout.data_size):
            names[model_file(layout.stage, index, rank)] = None
            if layout.stage:
                names[optimizer_file(index, rank)] = None
        places = [stored.weight for stored in part.parameters if stored.weight is not None]
        names |= dict.fromkeys(file for file, _ in [*places, *part.buffers.values()])
    return list(names)


def load_content(path: str | Path, *, map_location: Any = "cpu", is_mapped: bool = False) -> Any:
    """Read one file, or map it into memory, executing nothing.

    Raises:
        UserError: the file cannot be read, or holds objects that only the program that wrote it can create.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise _unsafe_file_error(path, error) from error
    except Exception as error:  # torch raises many kinds of errors for damaged files
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        message = f"{path} cannot be read ({reason}): use an older checkpoint"
        raise file_system_error(message, error) from error


def load_file(path: Path, *, is_mapped: bool = True) -> dict[str, Any]:
    """`load_content` of a file that holds a dictionary.

    Raises:
        UserError: as `load_content`, or the content is not a dictionary.
    """
    content = load_content(path, is_mapped=is_mapped)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint: name another")
    return content


def write_error(path: str | Path, error: Exception) -> UserError:
    """The error for a file that cannot be written: names the file, the reason and the remedy."""
    lines = str(error).splitlines() or [type(error).__name__]
    reason = getattr(error, "strerror", None) or lines[0]
    is_disk_error = isinstance(error, (OSError, MemoryError)) or type(error) is RuntimeError  # torch's own
    remedy = (
        "free space or choose another folder"
        if is_disk_error
        else "do not save this object, or save only its numbers, strings and tensors"
    )
    return file_system_error(f"{path}: {reason}; {remedy} (earlier checkpoints are untouched)", error)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn any error caused by inconsistent content into one line that starts with `where`.

    Raises:
        UserError: instead of any exception but `OSError`.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # values of unexpected types can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{where} is inconsistent ({reason}): use an older checkpoint") from error


def origin_of(content: Mapping[str, Any], path: Path, step: object) -> dict[str, Any]:
    """A file's description of itself: step, name, and a digest of its content without tensor elements.

    The manifest protects the bytes of each file. This also detects files that were exchanged or values that
    were edited, even if the manifest was updated to match.
    """
    digest = hashlib.sha256()
    for piece in _described({key: value for key, value in content.items() if key != ORIGIN_KEY}):
        digest.update(piece.encode())
    return {"step": step, "file": path.name, "digest": digest.hexdigest()}


def check_origin(content: Mapping[str, Any], path: Path, step: object) -> None:
    """Reject a file of another rank or save, or one that was edited, whatever its manifest says."""
    origin = content.get(ORIGIN_KEY)
    if origin is None:
        return  # written by an earlier version
    expected = origin_of(content, path, step)
    wrong = [key for key in expected if not isinstance(origin, dict) or origin.get(key) != expected[key]]
    if wrong == ["digest"]:
        raise UserError(f"{path} was changed after it was written: use an older checkpoint")
    if wrong:
        was = {key: origin[key] for key in wrong if key in origin} if isinstance(origin, dict) else origin
        raise UserError(f"{path} was written as {shown(was)}, not for step {step}: use an older checkpoint")


def _described(value: object) -> Iterator[str]:
    """Every key and value except tensor elements, in an order that depends only on the content."""
    if isinstance(value, Mapping):
        yield "{"
        for key, inner in sorted(value.items(), key=lambda item: repr(item[0])):
            yield repr(key)
            yield from _described(inner)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for inner in value:
            yield from _described(inner)
        yield "]"
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}"
    else:
        yield f"{type(value).__name__} {value!r},"


def _unsafe_file_error(path: str | Path, error: pickle.UnpicklingError) -> UserError:
    """The error for a file that would have to be executed, which torch's own message suggests."""
    kinds = str(error).split("GLOBAL ")[1].split()[0] if "GLOBAL " in str(error) else "pickled"
    return UserError(f"checkpoint file {path} is not loaded: {UNSAFE_FILE.format(kinds)}")


class Shards:
    """The files of a verified checkpoint; reads only `names`, the files listed in its manifest.

    `kept_bytes` limits the memory of mapped pages, see `_forget`.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        names: Collection[str],
        step: object = None,
        *,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.folder, self.layout, self._names, self._step = folder, layout, names, step
        self._kept = kept_bytes
        self._files: dict[str, dict[str, Any]] = {}
        self._read, self._largest = 0, 0  # bytes; see `_forget`

    def header(self, slice_index: int = 0, data_rank: int = 0) -> dict[str, Any]:
        """Content of a slice's model file: counters, scheduler and client state."""
        return self._file(model_file(self.layout.stage, slice_index, data_rank))

    def weight(self, slice_index: int, stored: StoredParameter) -> torch.Tensor:
        """The slice's part of a parameter: its fp32 master, or the model's weight if there is no master."""
        self._forget(stored.numel * torch.float32.itemsize)
        if stored.group == NOWHERE:
            return self._model_weight(slice_index, stored)
        if self.layout.stage == 0:
            master = self._stage_zero(slice_index)[MASTERS_KEY][stored.group][stored.offset]
            return self._checked(master, stored)
        flats = [
            self._zero_state(slice_index, rank)[FLAT_KEYS[self.layout.stage]][stored.group]
            for rank in range(self.layout.data_size)
        ]
        return self._assemble(slice_index, stored, flats)

    def state(self, slice_index: int, stored: StoredParameter) -> dict[str, Any]:
        """The inner optimizer's state of a parameter: moments in its shape, and step counts."""
        if stored.state == NOWHERE:
            return {}
        self._forget(stored.numel * torch.float32.itemsize)
        ranks = range(self.layout.data_size if self.layout.stage else 1)
        entries = [self._inner(slice_index, rank)["state"].get(stored.state, {}) for rank in ranks]
        state = dict(entries[0])
        for key, value in entries[0].items():
            if is_moment(value) and self.layout.stage:
                state[key] = self._assemble(slice_index, stored, [entry[key] for entry in entries])
            elif is_moment(value):
                state[key] = self._checked(value, stored)
        return state

    def hyper_parameters(self, slice_index: int, stored: StoredParameter) -> dict[str, Any]:
        """Learning rate, weight decay and so on of a trained parameter's group."""
        group = self._inner(slice_index, 0)["param_groups"][stored.optimizer_group]
        return {key: value for key, value in group.items() if key != "params"}

    def buffer(self, slice_index: int, name: str) -> torch.Tensor:
        return self._stored(self.layout.slices[slice_index].buffers[name], name)

    def _model_weight(self, slice_index: int, stored: StoredParameter) -> torch.Tensor:
        if stored.weight is not None:
            return self._checked(self._stored(stored.weight, stored.name), stored)
        pieces = [  # frozen, and partitioned over the data-parallel ranks
            self.header(slice_index, rank)[FROZEN_KEY][stored.name].flatten()
            for rank in range(self.layout.data_size)
        ]
        flat = torch.cat(pieces)
        if flat.numel() < stored.numel:
            raise self._shape_error(stored, (flat.numel(),))
        return flat[: stored.numel].view(stored.shape)

    def _assemble(self, slice_index: int, stored: StoredParameter, flats: list[torch.Tensor]) -> torch.Tensor:
        full = torch.empty(stored.numel, dtype=flats[0].dtype)
        for piece in self.layout.fragments(self.layout.slices[slice_index], stored):
            flat = flats[piece.data_rank]
            if flat.ndim != 1 or flat.numel() < piece.flat_start + piece.numel:
                raise self._shape_error(stored, tuple(flat.shape))
            full[piece.start : piece.start + piece.numel] = part_of(flat, piece)
        return full.view(stored.shape)

    def _stage_zero(self, slice_index: int) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.header(slice_index)["optimizer"]
        return state

    def _zero_state(self, slice_index: int, data_rank: int) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._file(optimizer_file(slice_index, data_rank))["optimizer_state_dict"]
        return state

    def _inner(self, slice_index: int, data_rank: int) -> Mapping[str, Any]:
        """The inner optimizer's state, as torch saves it."""
        stage = self.layout.stage
        holder = self._zero_state(slice_index, data_rank) if stage else self._stage_zero(slice_index)
        inner: Mapping[str, Any] = holder[INNER_KEYS.get(stage, "optimizer")]
        return inner

    def _stored(self, place: tuple[str, str], name: str) -> torch.Tensor:
        file, key = place
        if file.endswith(SAFETENSORS):
            return self._in_safetensors(file, key, name)
        content = self._file(file)
        weights = content["module"] if isinstance(content.get("module"), dict) else content
        if key not in weights:
            raise UserError(f"checkpoint {self.folder} lacks {name} ({key} of {file}): use another")
        value: torch.Tensor = weights[key]
        return value

    def _in_safetensors(self, file: str, key: str, name: str) -> torch.Tensor:
        """A tensor of a safetensors file, which is opened each time: closing it frees its pages."""
        self._refuse_unlisted(file)
        with reading(f"checkpoint {self.folder}"), safe_open(self.folder / file, "pt") as opened:
            if key not in opened.keys():  # noqa: SIM118
                raise UserError(f"checkpoint {self.folder} lacks {name} ({key} of {file}): use another")
            value: torch.Tensor = opened.get_tensor(key)
        return value

    def _refuse_unlisted(self, name: str) -> None:
        if name not in self._names:
            raise UserError(f"checkpoint {self.folder} lacks {name}: use an older checkpoint")

    def _forget(self, nbytes: int) -> None:
        """Close the mapped files before more is read from them than `kept_bytes`, or the largest tensor, has.

        The pages of a mapped file stay in the process's memory until it is closed: reading all parameters one
        by one would hold the whole checkpoint. Opening a file again reads only its description.
        """
        self._largest = max(self._largest, nbytes)
        if self._read + nbytes > max(self._largest, self._kept):
            self._files.clear()
            self._read = 0
        self._read += nbytes

    def _file(self, name: str) -> dict[str, Any]:
        self._refuse_unlisted(name)
        if name not in self._files:
            content = load_file(self.folder / name)
            check_origin(content, self.folder / name, self._step)
            self._files[name] = content
        return self._files[name]

    def _checked(self, value: torch.Tensor, stored: StoredParameter) -> torch.Tensor:
        if tuple(value.shape) != stored.shape:
            raise self._shape_error(stored, tuple(value.shape))
        return value

    def _shape_error(self, stored: StoredParameter, found: tuple[int, ...]) -> UserError:
        return UserError(
            f"checkpoint {self.folder}: {stored.name} should have shape {stored.shape}, but the stored "
            f"tensor has {found}: use an older checkpoint"
        )


def part_of(flat: torch.Tensor, piece: Fragment) -> torch.Tensor:
    """The view of a fragment in a rank's flat tensor."""
    return flat.narrow(0, piece.flat_start, piece.numel)


def is_moment(value: object) -> bool:
    """Whether an optimizer state has one element per parameter element, rather than being a step count."""
    return isinstance(value, torch.Tensor) and value.ndim > 0
