"""The texts of a study: documents in a fixed order, the last of which are held out.

A text is written once below the study's folder, as two files of JSON lines: `train.jsonl` and
`heldout.jsonl`. Documents are sorted by the SHA-256 of their content, so the held-out ones are a sample of
all subjects, and no document is in both. Equal ones are used once. `text.json` has the sizes and SHA-256
sums, which are part of the settings of each cell, and what they were made from.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megalowbit.data.local_files import LocalCorpus
from megalowbit.data.stdlib import StdlibCorpus
from megalowbit.durable_files import atomic_file, sha256_of
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.study_file import Text

SHORTEST_DOCSTRING = 200  # characters; shorter ones say little but names
TRAIN, HELD_OUT, FACTS = "train.jsonl", "heldout.jsonl", "text.json"
MADE_FROM = "made_from"


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What identifies a text: sizes in bytes of UTF-8, and SHA-256 of both files."""

    description: str
    train_bytes: int
    heldout_bytes: int
    train_sha256: str
    heldout_sha256: str


def write_text(text: Text, folder: Path, *, heldout_bytes: int) -> TextFacts:
    """Write the files of a text, unless they are there.

    Args:
        text: its entry in the study.
        folder: of this text.
        heldout_bytes: how much is held out, to whole documents.

    Raises:
        UserError: the source cannot be read, or is too small.
    """
    made_from = {"text": text.model_dump(mode="json"), "heldout_bytes": heldout_bytes}
    if (folder / FACTS).exists():
        recorded = read_json_object(folder / FACTS)
        before = recorded.pop(MADE_FROM, None)
        if before != made_from:
            raise UserError(
                f"{folder} was made from {before}, not from {made_from}: use another --out, or restore "
                "the study"
            )
        facts = TextFacts(**recorded)
        for name, digest in ((TRAIN, facts.train_sha256), (HELD_OUT, facts.heldout_sha256)):
            if not (folder / name).is_file() or sha256_of(folder / name) != digest:
                raise UserError(f"{folder / name} is not what was written: remove {folder} to write it again")
        return facts
    description, found = _documents(text)
    documents = sorted(set(found), key=lambda each: hashlib.sha256(each.encode()).digest())
    sizes = [len(each.encode()) for each in documents]
    num_held_out, held_out = 0, 0
    while held_out < heldout_bytes and num_held_out < len(documents):
        num_held_out += 1
        held_out += sizes[-num_held_out]
    rest = sum(sizes) - held_out
    if rest <= held_out:
        raise UserError(
            f"text {text.name!r} has {sum(sizes):,} bytes, too few to hold out {heldout_bytes:,}: "
            "use more text"
        )
    folder.mkdir(parents=True, exist_ok=True)
    parts = {TRAIN: documents[:-num_held_out], HELD_OUT: documents[-num_held_out:]}
    for name, part in parts.items():
        with atomic_file(folder / name) as file:
            file.writelines(json.dumps({"text": each}) + "\n" for each in part)
    facts = TextFacts(
        description=description,
        train_bytes=rest,
        heldout_bytes=held_out,
        train_sha256=sha256_of(folder / TRAIN),
        heldout_sha256=sha256_of(folder / HELD_OUT),
    )
    with atomic_file(folder / FACTS) as file:
        file.write(json.dumps({**asdict(facts), MADE_FROM: made_from}, indent=2) + "\n")
    return facts


def _documents(text: Text) -> tuple[str, list[str]]:
    """A description of the text, and its documents."""
    if text.source == "stdlib":
        import platform

        return f"sources of Python {platform.python_version()}", list(StdlibCorpus().documents())
    if text.source == "file":
        assert text.path is not None  # checked with the study
        if not text.path.exists():
            raise UserError(f"text {text.name!r}: {text.path} does not exist: name a file or a folder")
        return f"files of {text.path.name}", list(LocalCorpus(text.path).documents())
    folders = [_package_folder(text.name, package) for package in text.packages]
    versions = ", ".join(f"{package} {_version(package)}" for package in text.packages)
    return f"docstrings of {versions}", [each for folder in folders for each in docstrings(folder)]


def _package_folder(text: str, package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"text {text!r}: there is no installed package {package!r}: install or remove it")
    return Path(next(iter(found.submodule_search_locations)))


def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [package])
    return importlib.metadata.version(names[0])


def docstrings(folder: Path) -> Iterator[str]:
    """The longer docstrings of all modules below a folder, without tests: of modules, classes, functions."""
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.relative_to(folder).parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates; null bytes
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            found = ast.get_docstring(node)
            if found is not None and len(found) >= SHORTEST_DOCSTRING and _is_storable(found):
                yield found + "\n"


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate
        return False
    return True
