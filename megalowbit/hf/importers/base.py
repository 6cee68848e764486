"""What every importer returns: a Hugging Face configuration and weights that are read one by one.

An importer knows shapes and dtypes before it reads any element, so a configuration that does not fit is
rejected at once. Not covered: optimizer states and step counts; an imported model starts a new run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalowbit.checkpoints.shards import reading
from megalowbit.errors import UserError, file_system_error, shown

NAMES_SHOWN = 3


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: reads and returns it; the result may be a view of a mapped file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        """A tensor that a mapped file contains as it is."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @classmethod
    def joined(
        cls, parts: Sequence[torch.Tensor], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> StoredTensor:
        """The result of `join(parts)`, whose shape is computed without reading the parts."""
        probe = join([torch.empty_like(part, device="meta") for part in parts])
        return cls(tuple(probe.shape), probe.dtype, lambda: join(parts))


class LazyWeights(Mapping[str, torch.Tensor]):
    """Weights by name in the plain Hugging Face layout. Each access reads the tensor; nothing is kept.

    Attributes:
        stored: shape and dtype of every tensor, known before it is read.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        # masters are saved as tensors that require gradients
        with torch.no_grad(), reading(f"weight {name}"):
            value = stored.read().detach()
        if tuple(value.shape) != stored.shape or value.dtype != stored.dtype:
            raise UserError(f"weight {name} has parts of different dtypes or shapes: use another checkpoint")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def widest_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds all weights exactly."""
        widest: torch.dtype | None = None
        for each in self.stored.values():
            widest = each.dtype if widest is None else torch.promote_types(widest, each.dtype)
        return widest or torch.float32


class ForeignModel(NamedTuple):
    """A model in a checkpoint of another program.

    Attributes:
        hf_config: fields of its Hugging Face configuration.
        weights: its weights.
        description: what was read, for people: program, layout, step, dtype.
    """

    hf_config: dict[str, Any]
    weights: LazyWeights
    description: str


def fitted(
    weights: LazyWeights,
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    where: str,
) -> LazyWeights:
    """The weights under all `expected` names, checked.

    Args:
        weights: as an importer returns them.
        expected: name → shape in the state dict of the configuration's model.
        tied: name → name of the tensor that the configuration uses in its place.
        where: the checkpoint, for messages.

    Raises:
        UserError: a weight is missing, unexpected, has another shape, is not a floating-point tensor, or two
            tied weights differ.
    """
    stored = dict(weights.stored)
    for name, source in tied.items():
        if source not in stored:
            continue
        own, first = stored.get(name), stored[source]
        if own is not None and own.shape == first.shape and not _are_equal(own.read(), first.read()):
            raise UserError(
                f"{where}: {name} differs from {source}, but the configuration ties them: "
                "set tie_word_embeddings to false"
            )
        stored[name] = first
    missing, further = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing or further:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(further)} beyond it"] * bool(
            further
        )
        raise UserError(f"{where} does not fit the configuration: it {' and '.join(parts)}; correct --config")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise UserError(
                f"{where} does not fit the configuration: weight {name} has shape {stored[name].shape}, "
                f"the configuration says {shape}; correct --config"
            )
        if not stored[name].dtype.is_floating_point or stored[name].dtype.itemsize < 2:
            raise UserError(f"{where}: weight {name} is {stored[name].dtype}, whose scale is unknown")
    return LazyWeights({name: stored[name] for name in expected})


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


def numbers_up_to(found: Sequence[int], count: int) -> list[int]:
    """Numbers below `count` that are not in `found`: ranks whose files are missing."""
    return [number for number in range(count) if number not in set(found)]


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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
