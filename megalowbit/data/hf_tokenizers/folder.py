"""Folders with a Hugging Face tokenizer: loaded as their users load them, and what identifies their ids.

transformers decides by `tokenizer_config.json` and `config.json` which class a tokenizer has, and some
classes replace parts of `tokenizer.json`. The ids of a text show whether one did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_json_object, refuse_irregular_files

TEMPLATES = "additional_chat_templates"
TOKENIZER_JSON = "tokenizer.json"
MODEL_CONFIG = "config.json"
# Two tokenizers with the same ids for it are taken for the same. It has what normalizers and pre-tokenizers
# treat differently: letters in two code points, ligatures, digits, contractions, several spaces and lines.
TEXT_TO_COMPARE = (
    "The 1st of 23,456 tokens isn't 'naïve':\n\tfor x in range(10):  print(x)  # 漢字 🙂 übermäßig\n"
    "e\u0301 \u212b \ufb01 ½\u00a0WE'LL  don't...\r\n\n x+=1; (y)\n"
)
# The files that determine a folder's token ids; the folder may also hold gigabytes of weights.
FOLDER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)


def load_folder(folder: Path) -> Any:
    """The Hugging Face tokenizer in a folder, as its users load it.

    Raises:
        UserError: there is none, or it needs its own code.
    """
    from transformers import AutoTokenizer  # slow to import, and not all kinds need it

    refuse_irregular_files("tokenizer", folder, TEMPLATES)  # transformers would block on a FIFO
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,  # by default, transformers would ask on stdin
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0]
        if "trust_remote_code" in str(error):
            reason = "it needs its own code, which is never run; save it as a tokenizer.json"
        raise UserError(f"no usable tokenizer in folder {folder} ({reason}): name another") from error


def ids_of(loaded: Any) -> list[int] | None:
    """The ids that a Hugging Face tokenizer gives `TEXT_TO_COMPARE`, as `encoded` gives them."""
    return encoded(lambda: loaded(TEXT_TO_COMPARE, add_special_tokens=False, verbose=False)["input_ids"])


def encoded(encode: Callable[[], list[int]]) -> list[int] | None:
    """The ids from `encode`; None: the vocabulary lacks a word of the text, and has no token for that."""
    try:
        return encode()
    except Exception as error:  # the tokenizers library raises no other
        if "Missing [UNK] token" not in str(error):
            raise
        return None


def check_file(folder: Path, loaded: Any) -> None:
    """Check that a loaded tokenizer gives the ids of the file `tokenizer.json`, if there is one.

    Raises:
        UserError: its class has replaced parts of it.
    """
    path = folder / TOKENIZER_JSON
    if not path.is_file():
        return
    file = tokenizers.Tokenizer.from_file(str(path))  # transformers has read it
    file.no_truncation()
    file.no_padding()
    if ids_of(loaded) == encoded(lambda: file.encode(TEXT_TO_COMPARE, add_special_tokens=False).ids):
        return
    named, used = _class_in(folder), type(loaded).__name__
    raise UserError(
        f"tokenizer {folder}: transformers loads it as {used} ({named}), which does not give the ids of its "
        f'{TOKENIZER_JSON}: for these, copy it without {MODEL_CONFIG} and set "tokenizer_class": '
        f'"PreTrainedTokenizerFast" in tokenizer_config.json; for those of {used}, save it with transformers '
        "to a new folder"
    )


def _class_in(folder: Path) -> str:
    """The class and the model type that the files of a tokenizer name."""
    places = {"tokenizer_class": folder / "tokenizer_config.json", "model_type": folder / MODEL_CONFIG}
    found = {key: read_json_object(path).get(key) for key, path in places.items() if path.is_file()}
    return ", ".join(f"{key} {shown(value)}" for key, value in found.items())


def folder_fingerprint(folder: Path, loaded: Any) -> str:
    """Identifies a folder's token ids: its files, and what their class made of them.

    The class also depends on a `config.json`, whose other contents change no ids.
    """
    paths = {path for pattern in FOLDER_FILES for path in folder.glob(pattern) if path.is_file()}
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        digest.update(type(loaded).__name__.encode())
    else:
        facts = json.loads(backend.to_str())
        stages = [facts[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        digest.update(json.dumps(stages).encode())
    return digest.hexdigest()
