"""What every importer returns: a Hugging Face configuration and weights that are read one by one.

An importer knows shapes and dtypes before it reads any element, so a configuration that does not fit is
rejected at once. Not covered: optimizer states and step counts; an imported model starts a new run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalowbit.checkpoints.shards import reading
from megalowbit.errors import UserError, file_system_error, shown
from megalowbit.hf.folders.stored_weights import names_by_parameter, widest
from megalowbit.hf.importers.file_tensors import FileTensor
from megalowbit.json_text import read_text

MOST_MISSING = 9  # ranks that are looked for; messages name one less
LONGEST_NAME = 200  # bytes; file systems allow 255


class LazyTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: reads and returns it, in memory that nothing else refers to.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: FileTensor) -> LazyTensor:
        """A tensor that a file contains as it is."""
        return cls(tensor.shape, tensor.dtype, tensor.read)

    @classmethod
    def joined(
        cls, parts: Sequence[FileTensor], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> LazyTensor:
        """The result of `join(parts)`, whose shape is computed without reading the parts.

        Raises:
            UserError: the parts have several dtypes; torch would round or widen some of them.
        """
        if len({part.dtype for part in parts}) > 1:
            raise UserError("parts of a weight have several dtypes: use another checkpoint")
        probe = join([part.meta() for part in parts])
        return cls(tuple(probe.shape), probe.dtype, lambda: join([part.read() for part in parts]))

    @classmethod
    def concatenated(cls, pieces: Sequence[FileTensor], shape: tuple[int, ...]) -> LazyTensor:
        """The elements of contiguous pieces one after the other; what is left behind the shape is padding.

        Raises:
            UserError: the pieces have several dtypes, or gaps; on reading, they have too few elements.
        """
        numel, dtype = numel_of(shape), pieces[0].dtype
        if any(piece.dtype != dtype or not piece.is_contiguous for piece in pieces):
            raise UserError("parts of a weight have several dtypes, or gaps: use another checkpoint")

        def read() -> torch.Tensor:
            full, done = torch.empty(numel, dtype=dtype), 0
            for piece in pieces:
                part = piece.cut(0, (min(piece.numel(), numel - done),))
                part.read_into(full[done : done + part.numel()])
                done += part.numel()
            if done < numel:
                raise UserError(f"{done:,} of the {numel:,} elements of a weight are there: add all files")
            return full.view(shape)

        return cls(shape, dtype, read)


class LazyWeights(Mapping[str, torch.Tensor]):
    """Weights by name in the plain Hugging Face layout. Each access reads the tensor; nothing is kept.

    Attributes:
        stored: shape and dtype of every tensor, known before it is read.

    Raises:
        UserError: a name is no text.
    """

    def __init__(self, stored: Mapping[str, LazyTensor]) -> None:
        for name in stored:
            if not isinstance(name, str):
                raise UserError(f"a weight has the name {shown(name)}: use another checkpoint")
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        with reading(f"weight {name}"):
            value = stored.read()
        if tuple(value.shape) != stored.shape or value.dtype != stored.dtype:
            raise UserError(f"weight {name} has parts of different dtypes or shapes: use another checkpoint")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest that holds all weights exactly."""
        return widest(each.dtype for each in self.stored.values())


class ForeignModel(NamedTuple):
    """A model in a checkpoint of another program.

    Attributes:
        hf_config: fields of its Hugging Face configuration.
        weights: its weights.
        paths: the files that hold them.
        description: what was read, for people: program, layout, step, dtype.
    """

    hf_config: dict[str, Any]
    weights: LazyWeights
    paths: Sequence[Path]
    description: str


def check_and_select(weights: LazyWeights, expected: Mapping[str, torch.Tensor], where: str) -> LazyWeights:
    """The weights of a model, checked; of tied names only the first.

    Args:
        weights: as an importer returns them.
        expected: state dict of the configuration's model, with the parameters themselves.
        where: the checkpoint, for messages.

    Raises:
        UserError: a weight is missing, unexpected, misshapen or of a dtype that holds no weights, or two tied
            weights differ.
    """
    present = names_by_parameter(weights.stored, expected, where, remedy="correct --config")
    for first, *others in present.values():
        for other in others:
            is_same = weights.stored[other] is weights.stored[first]
            if not is_same and not _are_equal(weights[other], weights[first]):
                raise UserError(
                    f"{where}: {other} differs from {first}, but the configuration ties them: "
                    "set tie_word_embeddings to false"
                )
    return LazyWeights({first: weights.stored[names[0]] for first, names in present.items()})


def require_config(config: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The configuration that the user named.

    Raises:
        UserError: none was named.
    """
    if config is None:
        raise UserError(f"{where} has no Hugging Face configuration: name a config.json with --config")
    return dict(config)


def entries(folder: Path) -> list[str]:
    """Names in a folder, sorted.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        message = f"{folder} cannot be read ({error.strerror}): name a folder"
        raise file_system_error(message, error) from error


def named_step(path: Path) -> str:
    """The name of a step in a file such as `latest`.

    Raises:
        UserError: the file cannot be read, or holds what cannot be a name.
    """
    try:
        name = read_text(path).strip()
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): name the folder of a step"
        raise file_system_error(message, error) from error
    if len(name.encode()) > LONGEST_NAME or "\0" in name:
        raise UserError(f"{path} holds {shown(name)}, which cannot be a name: name the folder of a step")
    return name


def numbers_up_to(found: Sequence[int], count: int) -> list[int]:
    """The first numbers below `count` that are not in `found`: ranks whose files are missing."""
    known = set(found)
    missing = (number for number in range(count) if number not in known)
    return list(islice(missing, MOST_MISSING))  # a damaged count may be 2⁶²


def file_tensor(value: object, what: str) -> FileTensor:
    """A tensor of a file.

    Raises:
        UserError: it is something else, or a sparse, quantised or meta tensor.
    """
    if isinstance(value, FileTensor):
        return value
    found = "a sparse, quantised or meta tensor" if isinstance(value, torch.Tensor) else shown(value)
    raise UserError(f"{what} is {found}, not a plain tensor: use another checkpoint")


def flat_tensor(value: object, what: str) -> FileTensor:
    """A flat tensor of a file, whose elements lie one after the other.

    Raises:
        UserError: it is something else.
    """
    tensor = file_tensor(value, what)
    if len(tensor.shape) != 1 or not tensor.is_contiguous:
        raise UserError(f"{what} has shape {tensor.shape}, which is not flat: use another checkpoint")
    return tensor


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A shape read from a file: whole numbers ≥ 0.

    Raises:
        UserError: it is something else.
    """
    is_shape = isinstance(value, (tuple, list)) and all(type(size) is int and size >= 0 for size in value)
    if not is_shape:
        raise UserError(f"{where} has shape {shown(value)}: the file is damaged")
    return tuple(value)  # type: ignore[arg-type]


def numel_of(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def _are_equal(copy: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two tied weights are equal; the copy may be the rounded weight of a master."""
    return torch.equal(copy, first.to(copy.dtype))
