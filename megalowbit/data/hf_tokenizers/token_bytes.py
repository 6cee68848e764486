"""The bytes of UTF-8 that token ids stand for, from the tables of a tokenizer of the tokenizers library.

Bits per byte need their number. Decoding would not do: where ids begin or end within a character, it gives
U+FFFD, which has three bytes.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SPACE_OF_BYTES = "Ġ"  # the letter of a space in byte-level vocabularies
SPACE_OF_PIECES = "▁"  # and in SentencePiece's
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte of a character that SentencePiece's vocabulary lacks
UNKNOWN_BYTES = -1
# Bytes that UTF-8 does not have, and NUL, which a vocabulary may use to end documents (`ByteTokenizer`).
NOT_IN_TEXT = {0, 0xC0, 0xC1, *range(0xF5, 0x100)}
# What SentencePiece does, as stages of the tokenizers library; all other normalizers may change the text.
NORMALIZERS_OF_SPACES = [
    {"type": "Prepend", "prepend": SPACE_OF_PIECES},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_OF_PIECES},
]
# Unless their behaviour is "Removed", these only divide text, or mark spaces.
PRE_TOKENIZERS_THAT_KEEP = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"}


def count_bytes(
    name: str, backend: Any, ids: NDArray[Any], before: NDArray[Any], *, vocab_size: int, end: int
) -> int:
    """`Tokenizer.count_bytes` with the tables of a tokenizer of the tokenizers library.

    Args:
        name: the user's name for the tokenizer.
        backend: the tokenizer; None: it is of another library.
        ids: one-dimensional.
        before: the id that precedes each of them in the text.
        vocab_size: number of ids.
        end: the id that ends a document.
    """
    facts = {} if backend is None else json.loads(backend.to_str())
    reason = "it is not of the tokenizers library" if backend is None else _why_unknown(facts, backend)
    if reason is None:
        lengths, are_led = _byte_tables(facts, backend, vocab_size)
        lengths[end] = 0
        counted = lengths[ids]
        if not (counted == UNKNOWN_BYTES).any():
            added = are_led[ids] & (before == end)
            return int(counted.sum() - added.sum())
        number = int(ids[counted == UNKNOWN_BYTES][0])
        reason = f"{backend.id_to_token(number)!r} is in the text and may stand for any"
    logger.warning(
        "tokenizer %s: it is not known which bytes a token stands for (%s), so bits per byte are not counted",
        name,
        reason,
    )
    return 0


def _why_unknown(facts: dict[str, Any], backend: Any) -> str | None:
    """Why the bytes of a text do not follow from its ids; None: they do.

    Args:
        facts: the content of a `tokenizer.json`.
        backend: the same tokenizer.
    """
    vocabulary = backend.get_vocab(with_added_tokens=False)
    decoders = {part["type"] for part in _parts_of(facts["decoder"])}
    if not decoders & {"ByteLevel", "ByteFallback", "Metaspace"}:
        return "it is neither byte-level nor like SentencePiece"
    for part in _parts_of(facts["normalizer"]):
        if part not in NORMALIZERS_OF_SPACES:
            return f"its normalizer {part['type']} changes the text"
    for part in _parts_of(facts["pre_tokenizer"]):
        if part["type"] not in PRE_TOKENIZERS_THAT_KEEP or part.get("behavior") == "Removed":
            return f"its pre-tokenizer {part['type']} may remove text"
    model = facts["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its tokens have marks of words"
    if _unknown_id(model, vocabulary) is None:  # then the library drops what the vocabulary lacks
        letters = letters_of_bytes()
        spelling = letters.get if "ByteLevel" in decoders else "<0x{:02X}>".format
        if any(spelling(byte) not in vocabulary for byte in range(256) if byte not in NOT_IN_TEXT):
            return "it drops bytes that its vocabulary lacks"
    return None


def _byte_tables(
    facts: dict[str, Any], backend: Any, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """How many bytes each id stands for, and whether one is a space that tokenising put before a document.

    Not noticed: a document that begins with a space gets no further one from `ByteLevel` and `Metaspace`, so
    it counts a byte less; text behind a parsed special token may get one, too; SentencePiece's letter of a
    space counts as a space if the text has it.

    Returns:
        Both (vocab_size,); the first has `UNKNOWN_BYTES` for an id that stands for different texts, the
        second is for ids that begin a document.
    """
    decoders = {part["type"]: part for part in _parts_of(facts["decoder"])}
    is_bytewise = "ByteLevel" in decoders
    adds_space = any(part.get("add_prefix_space") for part in _parts_of(facts["pre_tokenizer"]))
    adds_space |= any(part["type"] == "Prepend" for part in _parts_of(facts["normalizer"]))
    adds_space |= (
        "Strip" in decoders or decoders.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    )
    space = SPACE_OF_BYTES if is_bytewise else SPACE_OF_PIECES
    lengths, are_led = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.bool_)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    for token, number in vocabulary.items():
        if is_bytewise:
            lengths[number] = len(token)  # a letter is a byte of the text
        else:
            lengths[number] = 1 if BYTE_PIECE.fullmatch(token) else len(token.replace(space, " ").encode())
        are_led[number] = adds_space and token.startswith(space)
    for number, added in backend.get_added_tokens_decoder().items():  # found in the text as they are
        takes_spaces = added.lstrip or added.rstrip
        lengths[number] = UNKNOWN_BYTES if takes_spaces else len(added.content.encode())
        are_led[number] = False
    if (unknown := _unknown_id(facts["model"], vocabulary)) is not None:
        lengths[unknown] = UNKNOWN_BYTES
    return lengths, are_led


def _unknown_id(model: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    """The id that stands for what the vocabulary lacks; None: there is none."""
    if model.get("unk_id") is not None:  # of Unigram
        return int(model["unk_id"])
    return vocabulary.get(model.get("unk_token") or "")


def _parts_of(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a stage of a tokenizer, which may be a sequence of them, and these again."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    parts = stage.get("decoders") or stage.get("pretokenizers") or stage.get("normalizers") or []
    return [single for part in parts for single in _parts_of(part)]


def letters_of_bytes() -> dict[int, str]:
    """The character that byte-level BPE (GPT-2) uses for each byte: itself, or the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
