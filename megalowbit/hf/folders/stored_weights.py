"""The weights of a Hugging Face folder under the names of the model, each read on access.

transformers accepts the names of a model without its head (`h.0.…` for `transformer.h.0.…`), a folder that
holds a tied weight under one of its names only, and buffers that models once stored. So does `StoredWeights`.
Nothing is executed, and no file is kept open: closing one frees its pages. Pickles written before torch 1.6
cannot be read in parts; the whole file is in memory while its weights are read.

Not covered: renamings by transformers for families that are not supported here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from megalowbit.errors import UserError, file_system_error, shortened
from megalowbit.hf.folders.weight_files import SAFETENSORS, StoredTensor, find_weight_files, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ZIP = b"PK\x03\x04"
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class StoredWeights(Mapping[str, torch.Tensor]):
    """The weights of a folder by the names of a model; of tied names only the first.

    Args:
        folder: holds weights in a form that `find_weight_files` describes.
        model: of the folder's configuration, perhaps on the meta device.
        former_buffers: ends of the names of buffers that older folders hold in addition.

    Attributes:
        paths: the files that are read.
        specs: dtype, shape and file of each weight.
        dtype: the narrowest that holds all stored weights exactly.

    Raises:
        UserError: a weight is missing, unexpected, misshapen or of a dtype that holds no weights; files are
            damaged, or differ from their index; tied weights have different values.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, former_buffers: Collection[str] = ()) -> None:
        self.folder = folder
        expected = model.state_dict(keep_vars=True)
        with _loading(folder):
            files = find_weight_files(folder)
            stored = stored_tensors(files)
        self.paths, self.dtype = files.paths, widest(each.dtype for each in stored.values())
        names = _names(stored, expected.keys(), model.base_model_prefix, folder)
        present = names_by_parameter(
            {name: stored[key] for name, key in names.items()},
            expected,
            str(folder),
            former_buffers=former_buffers,
        )
        self._keys = {first: names[found[0]] for first, found in present.items()}
        self.specs = {first: stored[key] for first, key in self._keys.items()}
        self._legacy: tuple[Path, Mapping[str, torch.Tensor]] | None = None
        for first, found in present.items():
            for other in found[1:]:
                self._refuse_other_values(first, other, names[other], stored[names[other]])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(self._keys[name], self.specs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _read(self, key: str, place: StoredTensor) -> torch.Tensor:
        value: torch.Tensor
        with _loading(self.folder):
            if place.path.name.endswith(SAFETENSORS):
                with safe_open(place.path, "pt") as file:
                    value = file.get_tensor(key)
            else:
                value = self._pickled(place.path)[key]
            if (value.dtype, tuple(value.shape)) != place[:2]:
                raise UserError(f"{place.path} changed while it was read: start again")
        return value.detach()

    def _pickled(self, path: Path) -> Mapping[str, torch.Tensor]:
        if self._legacy is not None and self._legacy[0] == path:
            return self._legacy[1]
        self._legacy = None
        with path.open("rb") as file:
            is_mapped = file.read(len(ZIP)) == ZIP  # the form of torch 1.6 and later
        content: Mapping[str, torch.Tensor] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=is_mapped
        )
        if not is_mapped:
            self._legacy = (path, content)
        return content

    def _refuse_other_values(self, name: str, other: str, key: str, place: StoredTensor) -> None:
        first, second = self[name], self._read(key, place)
        exact = torch.promote_types(first.dtype, second.dtype)
        if not same_bits(first.to(exact), second.to(exact)):
            raise other_tied_values(self.folder, other, name)


class Described(Protocol):
    """What is known of a stored tensor before it is read."""

    @property
    def dtype(self) -> torch.dtype | str:
        """Its dtype; a name if torch has none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


def names_by_parameter(
    stored: Mapping[str, Described],
    expected: Mapping[str, torch.Tensor],
    where: str,
    *,
    former_buffers: Collection[str] = (),
    remedy: str | None = None,
) -> dict[str, list[str]]:
    """Check that stored tensors are the weights of a model, without reading them.

    Args:
        stored: by the names of the model.
        expected: the model's state dict, with the parameters themselves.
        where: what holds them, for messages.
        former_buffers: ends of the names of buffers that may be stored in addition.
        remedy: what the user should do if names or shapes differ; None: what helps for a folder.

    Returns:
        Of every parameter, its first name in the model and all its names in `stored`.

    Raises:
        UserError: a weight is missing, unexpected, misshapen or of a dtype that holds no weights.
    """
    for name, found in stored.items():
        if name in expected and found.dtype not in WEIGHT_DTYPES:
            raise without_scale(where, name, found.dtype)
    groups = tied_names(expected)
    missing = [group[0] for group in groups if not any(name in stored for name in group)]
    unexpected = [
        name for name in stored if name not in expected and not name.endswith(tuple(former_buffers))
    ]
    refuse_differences(missing, unexpected, where, remedy)
    present = {group[0]: [name for name in group if name in stored] for group in groups}
    for name in chain(*present.values()):
        if stored[name].shape != expected[name].shape:
            raise misshapen(where, name, stored[name].shape, expected[name].shape, remedy)
    return present


def tied_names(state_dict: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of a state dict, grouped by parameter; it must hold the parameters themselves."""
    groups: dict[int, list[str]] = {}
    for name, value in state_dict.items():
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, those of NaN and of −0 included."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    views = (each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second))
    return torch.equal(*views)


def widest(dtypes: Any) -> torch.dtype:
    """The narrowest dtype that holds weights of all these dtypes exactly; fp32 if there are none."""
    known = set(dtypes)
    weights = [dtype for dtype in WEIGHT_DTYPES if dtype in known] or [torch.float32]
    return functools.reduce(torch.promote_types, weights)


def misshapen(
    where: str, name: str, found: Collection[int], expected: Collection[int], remedy: str | None = None
) -> UserError:
    """The error for a weight of another shape than the configuration's."""
    return UserError(
        f"{where}: weight {name} has shape {tuple(found)}, its configuration says {tuple(expected)}: "
        f"{remedy or 'correct the overrides'}"
    )


def without_scale(where: str, name: str, dtype: torch.dtype | str) -> UserError:
    """The error for a quantised weight."""
    return UserError(f"{where}: weight {name} is {dtype}, whose scale is unknown: save the model unquantised")


def other_tied_values(folder: Path | str, other: str, name: str) -> UserError:
    """The error for weights that a configuration ties and that differ."""
    return UserError(
        f"{folder}: its configuration ties {other} to {name}, but their values differ: "
        "set tie_word_embeddings to false in its config.json or in model.overrides"
    )


def refuse_differences(
    missing: Collection[str], unexpected: Collection[str], where: str, remedy: str | None = None
) -> None:
    """Check that weights and configuration have the same names.

    Raises:
        UserError: names the first weight that is missing or unexpected.
    """
    if missing:
        raise UserError(f"{where} lacks {_first_weight(missing)}: {remedy or 'replace it'}")
    if unexpected:
        raise UserError(
            f"{where} has {_first_weight(unexpected)} that its configuration does not have: "
            f"{remedy or 'correct its config.json or the overrides'}"
        )


def refuse_nonfinite_weight(name: str, weight: torch.Tensor, where: str) -> None:
    """Check that a weight is finite; otherwise no loss of the model would be.

    Raises:
        UserError: it has NaN or infinity.
    """
    # aminmax gives two numbers a tensor, NaN if it has one, and needs no mask of the tensor's size
    if weight.numel() and not all(bound.isfinite() for bound in weight.aminmax()):
        count = int((~weight.isfinite()).sum())
        raise UserError(
            f"{where}: weight {name} has {count} values that are NaN or infinite, which makes every loss "
            "non-finite: use another checkpoint"
        )


def narrowed(name: str, weight: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """A weight in the dtype in which it is written.

    Raises:
        UserError: finite values would become infinite.
    """
    written = weight.to(dtype)
    if written.numel() and not all(bound.isfinite() for bound in written.aminmax()):
        lost = weight[weight.isfinite() & ~written.isfinite()]
        if lost.numel():
            wider = "bfloat16" if dtype == torch.float16 else "float32"
            largest, limit = lost.abs().max().item(), torch.finfo(dtype).max
            raise UserError(
                f"{where}: weight {name} has values up to {largest:.6g}, and the largest number of "
                f"{str(dtype).removeprefix('torch.')} is {limit:.6g}: choose {wider} as its dtype (--dtype)"
            )
    return written


def _names(stored: Collection[str], expected: Collection[str], prefix: str, folder: Path) -> dict[str, str]:
    """Name in the model → name in the files; a name that is not the model's stands for itself."""
    names: dict[str, str] = {}
    for key in stored:
        name = f"{prefix}.{key}" if key not in expected and f"{prefix}.{key}" in expected else key
        if name in names:
            raise UserError(f"{folder} holds the weight {name} twice, as {names[name]} and {key}: remove one")
        names[name] = key
    return names


def _first_weight(names: Collection[str]) -> str:
    """`the weight a and 2 others`."""
    others = len(names) - 1
    more = "" if not others else " and 1 other" if others == 1 else f" and {others:,} others"
    return f"the weight {min(names)}{more}"


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Turn every error of a damaged file into one line; a damaged pickle can raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = shortened(str(error).strip().split("\n")[0]) or type(error).__name__
        message = f"the weights in {folder} cannot be loaded ({reason}): replace the folder"
        raise file_system_error(message, error) from error
