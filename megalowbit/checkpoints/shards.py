"""A checkpoint's files as tensors of one slice: fragments put together, one parameter at a time.

Files are mapped into memory and nothing in them is executed (`weights_only`), so a tensor costs memory only
while it is looked at. File names are DeepSpeed's: `mp_rank_01_model_states.pt` holds the weights, and at
stage 0 the optimizer, of slice 1; `zero_pp_rank_3_mp_rank_01_optim_states.pt` what data-parallel rank 3 has.
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
ORIGIN_KEY = "megalowbit_origin"  # in a file: what `origin_of` says of it
FOREIGN = (
    "it holds objects that only their own program can make ({}): it was not written by this version of "
    "megalowbit; start from its weights instead"
)


def model_file(stage: int, slice_index: int, data_rank: int = 0) -> str:
    """Name of the file with a slice's weights and counters; at stage 3 every data-parallel rank has one."""
    prefix = f"zero_pp_rank_{data_rank}_" if stage == 3 else ""
    return f"{prefix}mp_rank_{slice_index:02d}_model_states.pt"


def optimizer_file(slice_index: int, data_rank: int) -> str:
    """Name of the file with what a data-parallel rank has of a slice's masters and moments, stages 1 to 3."""
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
        UserError: it cannot be read, or holds objects that only their program can make.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise _foreign(path, error) from error
    except Exception as error:  # of many kinds, if a file is not what torch has written
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        message = f"{path} cannot be read ({reason}): use an older checkpoint"
        raise file_system_error(message, error) from error


def load_file(path: Path, *, is_mapped: bool = True) -> dict[str, Any]:
    """`load_content` of a file that holds names and what they stand for.

    Raises:
        UserError: as `load_content`, or it is no mapping.
    """
    content = load_content(path, is_mapped=is_mapped)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint: name another")
    return content


def write_error(path: str | Path, error: Exception) -> UserError:
    """What is said of a file that cannot be written: which one, why, what to do."""
    lines = str(error).splitlines() or [type(error).__name__]
    reason = getattr(error, "strerror", None) or lines[0]
    is_of_disk = isinstance(error, (OSError, MemoryError)) or type(error) is RuntimeError  # torch's own
    remedy = (
        "free space or choose another folder"
        if is_of_disk
        else "leave it out of what is saved, or save its numbers, texts and tensors"
    )
    return file_system_error(f"{path}: {reason}; {remedy} (earlier checkpoints are untouched)", error)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Say in one line, which `where` opens, that what is read contradicts itself, whatever that leads to.

    Raises:
        UserError: in place of any other exception but those of the file system.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # values of other kinds than were written
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{where} contradicts itself ({reason}): use an older checkpoint") from error


def origin_of(content: Mapping[str, Any], path: Path, step: object) -> dict[str, Any]:
    """What a file says of itself: its step, its name, and a digest of all it holds but tensors' elements.

    A manifest vouches for bytes; this for what they mean, if files were exchanged or values changed and the
    manifest was made to agree.
    """
    digest = hashlib.sha256()
    for piece in _described({key: value for key, value in content.items() if key != ORIGIN_KEY}):
        digest.update(piece.encode())
    return {"step": step, "file": path.name, "digest": digest.hexdigest()}


def check_origin(content: Mapping[str, Any], path: Path, step: object) -> None:
    """Refuse a file of another rank or another save, or one that was changed, whatever its manifest says."""
    origin = content.get(ORIGIN_KEY)
    if origin is None:
        return  # written by an earlier version
    expected = origin_of(content, path, step)
    wrong = [key for key in expected if not isinstance(origin, dict) or origin.get(key) != expected[key]]
    if wrong == ["digest"]:
        raise UserError(f"{path} was changed after it was written: use an older checkpoint")
    if wrong:
        was = {key: origin[key] for key in wrong if key in origin} if isinstance(origin, dict) else origin
        raise UserError(f"{path} was written as {shown(was)}, not of step {step}: use an older checkpoint")


def _described(value: object) -> Iterator[str]:
    """Every value that is no tensor's element, with the keys that lead to it, in an order of its own."""
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


def _foreign(path: str | Path, error: pickle.UnpicklingError) -> UserError:
    """What is said of a file that is refused; torch's own message advises to execute it."""
    kinds = str(error).split("GLOBAL ")[1].split()[0] if "GLOBAL " in str(error) else "pickled"
    return UserError(f"checkpoint file {path} is not loaded: {FOREIGN.format(kinds)}")


class Shards:
    """The files of a verified checkpoint; only `names` are read, those that its manifest vouches for."""

    def __init__(self, folder: Path, layout: Layout, names: Collection[str], step: object = None) -> None:
        self.folder, self.layout, self._names, self._step = folder, layout, names, step
        self._files: dict[str, dict[str, Any]] = {}

    def header(self, slice_index: int = 0, data_rank: int = 0) -> dict[str, Any]:
        """Content of a slice's model file: counters, scheduler, client state."""
        return self._file(model_file(self.layout.stage, slice_index, data_rank))

    def weight(self, slice_index: int, stored: StoredParameter) -> torch.Tensor:
        """The slice's part of a parameter, as exactly as it is stored: its fp32 master if it has one."""
        if stored.group == NOWHERE:
            return self._computing_weight(slice_index, stored)
        if self.layout.stage == 0:
            master = self._stage_zero(slice_index)[MASTERS_KEY][stored.group][stored.offset]
            return self._checked(master, stored)
        flats = [
            self._zero_state(slice_index, rank)[FLAT_KEYS[self.layout.stage]][stored.group]
            for rank in range(self.layout.data_size)
        ]
        return self._assemble(slice_index, stored, flats)

    def state(self, slice_index: int, stored: StoredParameter) -> dict[str, Any]:
        """What the inner optimizer keeps of a parameter: moments in its shape, and counts of steps."""
        if stored.state == NOWHERE:
            return {}
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
        """Those of a trained parameter's group: learning rate, weight decay and so on."""
        group = self._inner(slice_index, 0)["param_groups"][stored.optimizer_group]
        return {key: value for key, value in group.items() if key != "params"}

    def buffer(self, slice_index: int, name: str) -> torch.Tensor:
        return self._stored(self.layout.slices[slice_index].buffers[name], name)

    def _computing_weight(self, slice_index: int, stored: StoredParameter) -> torch.Tensor:
        if stored.weight is not None:
            return self._checked(self._stored(stored.weight, stored.name), stored)
        pieces = [  # frozen, and cut over the data-parallel ranks
            self.header(slice_index, rank)[FROZEN_KEY][stored.name].flatten()
            for rank in range(self.layout.data_size)
        ]
        flat = torch.cat(pieces)
        if flat.numel() < stored.numel:
            raise self._misfit(stored, (flat.numel(),))
        return flat[: stored.numel].view(stored.shape)

    def _assemble(self, slice_index: int, stored: StoredParameter, flats: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.empty(stored.numel, dtype=flats[0].dtype)
        for piece in self.layout.fragments(self.layout.slices[slice_index], stored):
            flat = flats[piece.data_rank]
            if flat.ndim != 1 or flat.numel() < piece.flat_start + piece.numel:
                raise self._misfit(stored, tuple(flat.shape))
            whole[piece.start : piece.start + piece.numel] = part_of(flat, piece)
        return whole.view(stored.shape)

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
        content = self._file(file)
        weights = content["module"] if isinstance(content.get("module"), dict) else content
        if key not in weights:
            raise UserError(f"checkpoint {self.folder} lacks {name} ({key} of {file}): use another")
        value: torch.Tensor = weights[key]
        return value

    def _file(self, name: str) -> dict[str, Any]:
        if name not in self._names:
            raise UserError(f"checkpoint {self.folder} lacks {name}: use an older checkpoint")
        if name not in self._files:
            content = load_file(self.folder / name)
            check_origin(content, self.folder / name, self._step)
            self._files[name] = content
        return self._files[name]

    def _checked(self, value: torch.Tensor, stored: StoredParameter) -> torch.Tensor:
        if tuple(value.shape) != stored.shape:
            raise self._misfit(stored, tuple(value.shape))
        return value

    def _misfit(self, stored: StoredParameter, found: tuple[int, ...]) -> UserError:
        return UserError(
            f"checkpoint {self.folder}: {stored.name} should have shape {stored.shape}, what is stored has "
            f"{found}: use an older checkpoint"
        )


def part_of(flat: torch.Tensor, piece: Fragment) -> torch.Tensor:
    """The view of a fragment in a rank's flat tensor."""
    return flat.narrow(0, piece.flat_start, piece.numel)


def is_moment(value: object) -> bool:
    """Whether an optimizer's state is of a parameter's elements, and no count of steps."""
    return isinstance(value, torch.Tensor) and value.ndim > 0
