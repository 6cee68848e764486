"""The texts of a study: documents in a fixed order, and parts of others that are held out.

A text is written once below the study's folder, as two files of JSON lines: `train.jsonl` and
`heldout.jsonl`. Documents are sorted by the SHA-256 of their content, so the held-out ones are a sample of
all subjects. Equal ones are used once. `text.json` has the sizes and SHA-256 sums, which are part of the
settings of each cell, and what they were made from.

Held out are the middles of at least 32 documents, so that no single document decides. The rest of these
documents is used for nothing. A document is only chosen if nearly none of its phrases, eight words in a row,
stands in another one: otherwise a model could know them by heart.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.text_files.stdlib import StdlibCorpus
from megalowbit.durable_files import atomic_file, sha256_of
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.study_file import Text

SHORTEST_DOCSTRING = 200  # characters; shorter ones say little but names
LEAST_DOCUMENTS = 32  # held out
WORDS = 8  # of a phrase
MOST_REPEATED = 0.05  # of the phrases of a held-out part
TRAIN, HELD_OUT, FACTS = "train.jsonl", "heldout.jsonl", "text.json"
MADE_FROM, FILES = "made_from", "sha256_of_files"  # also in text.json
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of a node that hold others


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What identifies a text: sizes in bytes of UTF-8, and SHA-256 of both files.

    `heldout_repeated` is the share of the held-out phrases of eight words that the training text has too.
    """

    description: str
    train_bytes: int
    heldout_bytes: int
    heldout_documents: int
    heldout_repeated: float
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
    facts = facts_in(folder)
    if facts is not None:
        recorded = read_json_object(folder / FACTS)
        before = recorded.get(MADE_FROM)
        _check_files(text, recorded.get(FILES), folder)
        if before != made_from:
            raise UserError(
                f"{folder} was made from {before}, not from {made_from}: use another --out, or restore "
                "the study"
            )
        for name, digest in ((TRAIN, facts.train_sha256), (HELD_OUT, facts.heldout_sha256)):
            if not (folder / name).is_file() or sha256_of(folder / name) != digest:
                raise UserError(f"{folder / name} is not what was written: remove {folder} to write it again")
        return facts
    files = _digest_of_files(text)
    description, found = _documents(text)
    documents = sorted(set(found), key=lambda each: hashlib.sha256(each.encode()).digest())
    train, held_out = _split(text.name, documents, heldout_bytes)
    in_training = {phrase for each in train for phrase in _phrases(each)}
    held_out_phrases = [phrase for each in held_out for phrase in _phrases(each)]
    repeated = sum(phrase in in_training for phrase in held_out_phrases)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in ((TRAIN, train), (HELD_OUT, held_out)):
        with atomic_file(folder / name) as file:
            file.writelines(json.dumps({"text": each}) + "\n" for each in part)
    facts = TextFacts(
        description=description,
        train_bytes=_num_bytes(train),
        heldout_bytes=_num_bytes(held_out),
        heldout_documents=len(held_out),
        heldout_repeated=round(repeated / max(1, len(held_out_phrases)), 4),
        train_sha256=sha256_of(folder / TRAIN),
        heldout_sha256=sha256_of(folder / HELD_OUT),
    )
    with atomic_file(folder / FACTS) as file:
        file.write(json.dumps({**asdict(facts), MADE_FROM: made_from, FILES: files}, indent=2) + "\n")
    return facts


def _digest_of_files(text: Text) -> str | None:
    """Of the names and contents of a text's own files; None: it has none, or they are gone."""
    if text.path is None or not text.path.exists():
        return None
    return LocalCorpus(text.path).fingerprint


def _check_files(text: Text, before: Any, folder: Path) -> None:
    """Check that the files are those that the text was made from; without them its own copy counts.

    Raises:
        UserError: they have changed.
    """
    if before is None or (now := _digest_of_files(text)) in (None, before):  # earlier versions recorded none
        return
    raise UserError(
        f"{text.path} has changed since text {text.name!r} was made from it (SHA-256 {before[:8]}, now "
        f"{now[:8]}): restore it, or use another --out instead of {folder.parent.parent}"
    )


def facts_in(folder: Path) -> TextFacts | None:
    """What identifies the text in this folder; None if there is none.

    Raises:
        UserError: its file is damaged, or was written by another version.
    """
    path = folder / FACTS
    if not path.exists():
        return None
    recorded = read_json_object(path)
    names = [each.name for each in fields(TextFacts)]
    if missing := [name for name in names if name not in recorded]:
        raise UserError(
            f"{path} has no {missing[0]!r}, so another version wrote it: use another --out, or remove "
            f"{folder} to write the text again"
        )
    wrong = [each.name for each in fields(TextFacts) if type(recorded[each.name]).__name__ != each.type]
    if wrong:
        raise UserError(f"{path} is damaged ({wrong[0]!r}): remove {folder} to write the text again")
    return TextFacts(**{name: recorded[name] for name in names})


def _split(name: str, documents: Sequence[str], heldout_bytes: int) -> tuple[list[str], list[str]]:
    """The training documents, and parts of other documents with `heldout_bytes` or a little more."""
    occurrences = Counter(phrase for each in documents for phrase in set(_phrases(each)))
    train, held_out, held_out_bytes = [], [], 0
    for document in reversed(documents):
        part = _middle(document, heldout_bytes // LEAST_DOCUMENTS)
        phrases = _phrases(part)
        num_repeated = sum(occurrences[phrase] > 1 for phrase in phrases)
        if held_out_bytes < heldout_bytes and phrases and num_repeated <= MOST_REPEATED * len(phrases):
            held_out.append(part)
            held_out_bytes += len(part.encode())
        else:
            train.append(document)
    if held_out_bytes < heldout_bytes or _num_bytes(train) <= held_out_bytes:
        raise UserError(
            f"text {name!r} has {len(documents):,} different documents with {_num_bytes(documents):,} bytes, "
            f"too few to hold out {heldout_bytes:,} bytes in {LEAST_DOCUMENTS} parts whose phrases occur "
            "nowhere else: use more text"
        )
    return train[::-1], held_out[::-1]


def _middle(document: str, num_bytes: int) -> str:
    encoded = document.encode()
    start = max(0, (len(encoded) - num_bytes) // 2)
    return encoded[start : start + num_bytes].decode(errors="ignore")  # half characters at the ends


def _phrases(document: str) -> list[int]:
    """A hash of each run of eight words, to save memory."""
    words = document.split()
    return [hash(phrase) for phrase in zip(*(words[start:] for start in range(WORDS)), strict=False)]


def _num_bytes(documents: Sequence[str]) -> int:
    return sum(len(each.encode()) for each in documents)


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
        for node in _with_docstrings(tree):
            found = ast.get_docstring(node)
            if found is not None and len(found) >= SHORTEST_DOCSTRING and _is_storable(found):
                yield found + "\n"


def _with_docstrings(tree: ast.Module) -> Iterator[Definition]:
    """The module and its definitions: `ast.walk` without expressions, which are most of a tree."""
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            yield node
        for field in STATEMENTS:
            waiting += getattr(node, field, ())


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate
        return False
    return True
