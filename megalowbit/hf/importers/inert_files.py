"""Reads files of `torch.save` that contain objects of other programs, without running any of their code.

Checkpoints of DeepSpeed and Megatron-LM contain a few objects besides tensors: arguments
(`argparse.Namespace`), enumerations, loss scalers. `torch.load(weights_only=True)` rejects names that it does
not know. Here it is given a class of ours under each such name. This class only keeps what the pickle passes
to it, so nothing is imported or called by a name from the file, and DeepSpeed and Megatron-LM need not be
installed. torch itself still rejects names of `os` and `sys`.

Not covered: other kinds of dictionaries and lists (`collections.defaultdict`), which torch rejects under any
name; files in the format of torch before 1.6, if they contain such objects.
"""

from __future__ import annotations

import pickle
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from megalowbit.errors import UserError, file_system_error, shortened, shown
from megalowbit.hf.importers.file_tensors import Archive, with_file_tensors


class Inert:
    """Stands for an object of another program.

    Attributes:
        kind: dotted name of its class in that program.
        arguments: what its constructor would have received.
        state: its attributes.
    """

    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.__dict__.update(arguments=arguments, state=None)
        return made

    def __init__(self, *_: Any) -> None:
        """Keep nothing more than `__new__` does."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def read_inert(path: Path, *, is_dictionary: bool = True) -> Any:
    """Content of a file; its tensors are `FileTensor`, and objects of other programs are `Inert`.

    Args:
        path: the file.
        is_dictionary: reject a file that does not hold a dictionary.

    Raises:
        UserError: the file cannot be read, holds something else, or names code that is never allowed.
    """
    try:
        content = _read_archive(path) if _is_archive(path) else _read_former(path)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        message = f"{path} is not loaded, because it holds objects that are not allowed: {_reason(error)}"
        raise UserError(message) from error
    except Exception as error:  # torch raises many kinds of errors for damaged files
        message = f"{path} cannot be read ({_reason(error)}): use another checkpoint"
        raise file_system_error(message, error) from error
    if is_dictionary and not isinstance(content, dict):
        raise UserError(f"{path} holds {shown(type(content).__name__)}, not a checkpoint: name another")
    return content


def fields_of(value: object) -> dict[str, Any]:
    """Attributes of an `Inert` object or items of a dictionary; empty for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    state = value.state if isinstance(value, Inert) else None
    return dict(state) if isinstance(state, Mapping) else {}


def _is_archive(path: Path) -> bool:
    """Whether the file has torch's current format."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no regular file: use another checkpoint")
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _read_archive(path: Path) -> Any:
    archive, storages = Archive(path), []

    def note(storage: Any, _: str) -> Any:
        storages.append(storage)
        return storage

    # names of classes that torch does not allow are listed, not imported
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    with torch.serialization.safe_globals([_inert_class(name) for name in names]):
        content = torch.load(path, map_location=note, weights_only=True, mmap=True)
    return with_file_tensors(content, archive.sources(storages))


def _read_former(path: Path) -> Any:
    """The format before torch 1.6, which cannot be read in parts."""
    return with_file_tensors(torch.load(path, map_location="cpu", weights_only=True), {})


def _inert_class(name: str) -> tuple[Any, str]:
    """A class of ours under another program's name, in the form that `safe_globals` takes."""
    return type("Inert", (Inert,), {"kind": name}), name


def _reason(error: Exception) -> str:
    """The part of torch's message that says what is wrong."""
    text = str(error).strip()
    if "GLOBAL " in text:
        return text.split("GLOBAL ")[1].split()[0]
    text = text.split("WeightsUnpickler error:")[-1].strip()
    return shortened(text.split("\n")[0], 200) or type(error).__name__
