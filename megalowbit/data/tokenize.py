"""Text to token ids: bytes, a BPE trained on the corpus, or a Hugging Face tokenizer folder.

Every tokenizer has an end-of-document id, which packing appends to each document. Every tokenizer can be
saved as a Hugging Face tokenizer that gives the same ids, so `AutoTokenizer` can be used with the trained
model; beside some models, transformers builds a class that ignores parts of `tokenizer.json`, and this is
refused. No tokens are added at the beginning of a text. Text that spells a special token (`<|endoftext|>`) is
ordinary text, so an end-of-document id in the tokens always is the end of a document; or, if the settings ask
for it, becomes that token, as in the saved tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megalowbit.data.cache.built_files import WAIT_SECONDS, cached_file
from megalowbit.data.cache.digests import key_of
from megalowbit.data.corpus import Corpus
from megalowbit.data.hf_tokenizers.folder import (
    MODEL_CONFIG,
    TEXT_TO_COMPARE,
    TOKENIZER_JSON,
    check_file,
    encoded,
    folder_fingerprint,
    ids_of,
    load_folder,
)
from megalowbit.data.hf_tokenizers.token_bytes import count_bytes, letters_of_bytes
from megalowbit.data.settings import (
    BPE_TOKENIZER,
    BYTE_TOKENIZER,
    NO_TOKENIZER,
    SMALLEST_BPE,
    DataSettings,
)
from megalowbit.data.sources import open_corpus
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT]  # these get the first ids
END_OF_DOCUMENT_BYTE = "\0"
# More text takes longer to count but does not change which merges are frequent.
BPE_TRAINING_CHARACTERS = 256 * 2**20
BPE_FORMAT = 1  # increment when training changes, so that cached tokenizers are trained again


class Tokenizer(ABC):
    """Converts text to ids in 0 … vocab_size-1.

    Attributes:
        name: the user's name for it.
        vocab_size: number of ids; a model needs at least this `vocab_size`.
        eos_token_id: id that ends a document; None if it is not known, and then nothing can be tokenised.
        fingerprint: hexadecimal; equal for tokenizers that give equal ids.
        begin: id and name of the token that transformers, and servers with it, put before a text by default;
            None: none. `encode_batch` does not.
    """

    name: str
    vocab_size: int
    eos_token_id: int | None
    fingerprint: str
    begin: tuple[int, str] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype, uint16 or uint32, that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        """The ids of each text as a one-dimensional array of `dtype`, without an end-of-document id."""

    @abstractmethod
    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        """Bytes of UTF-8 that these ids stand for; an end of a document has none. 0: they are not known.

        Bytes are counted, not characters: an id may stand for a part of one.

        Args:
            ids: one-dimensional.
            before: the id that precedes each of them in the text.
        """

    @abstractmethod
    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer as a Hugging Face one, whatever else is in the folder."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer so that `AutoTokenizer.from_pretrained(folder)` gives the same ids.

        Raises:
            UserError: it would give others, because of the model whose configuration is in `folder`.
        """
        self.write(folder)
        config = Path(folder) / MODEL_CONFIG
        if self.eos_token_id is None or not config.is_file():
            return
        loaded = load_folder(Path(folder))
        if ids_of(loaded) != encoded(lambda: self.encode_batch([TEXT_TO_COMPARE])[0].tolist()):
            family, used = read_json_object(config).get("model_type"), type(loaded).__name__
            raise UserError(
                f"tokenizer {self.name} cannot be exported with a {family} model: transformers would load it "
                f"as {used}, which gives other ids: use a tokenizer of a {family} model, train a model of "
                "another family, or set checkpoint.export_hf to false"
            )

    def check_export(self, model_type: str) -> None:
        """Check that the tokenizer can be saved with a model of this type.

        Raises:
            UserError: as `save_pretrained`.
        """
        if self.eos_token_id is None:  # nothing is saved
            return
        with TemporaryDirectory() as folder:
            (Path(folder) / MODEL_CONFIG).write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
            self.save_pretrained(folder)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids; 0, the NUL byte, ends a document.

    NUL bytes inside a document are dropped, because they would end it early.
    """

    name = BYTE_TOKENIZER
    vocab_size = 256
    eos_token_id = 0
    fingerprint = hashlib.sha256(b"UTF-8 bytes, NUL ends a document").hexdigest()

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        return [
            np.frombuffer(text.replace(END_OF_DOCUMENT_BYTE, "").encode("utf-8"), dtype=np.uint8).astype(
                self.dtype
            )
            for text in texts
        ]

    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:  # noqa: ARG002
        return int(np.count_nonzero(ids))

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write a byte-level BPE without merges; unlike this class it keeps NULs within a text, as id 0."""
        vocabulary = {letter: byte for byte, letter in letters_of_bytes().items()}
        # The end-of-document token must have id 0 and match only a NUL, so it replaces that byte.
        vocabulary = {
            END_OF_DOCUMENT_BYTE if byte == 0 else letter: byte for letter, byte in vocabulary.items()
        }
        bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bytewise.decoder = tokenizers.decoders.ByteLevel()
        bytewise.add_special_tokens([END_OF_DOCUMENT_BYTE])
        _save(bytewise, END_OF_DOCUMENT_BYTE, folder)


class BPETokenizer(Tokenizer):
    """A byte-level BPE from a file that `train_bpe` wrote; `<|endoftext|>` (id 0) ends a document.

    Args:
        path: the file.
        parse_special_tokens: whether text that spells `<|endoftext|>` becomes that token.
    """

    name = BPE_TOKENIZER
    eos_token_id: int

    def __init__(self, path: Path, *, parse_special_tokens: bool = False) -> None:
        text = path.read_text(encoding="utf-8")
        self._parses = parse_special_tokens
        self.fingerprint = _fingerprint(hashlib.sha256(text.encode()).hexdigest(), parse_special_tokens)
        self._bpe = tokenizers.Tokenizer.from_str(text)
        self.vocab_size = self._bpe.get_vocab_size()
        self.eos_token_id = SPECIAL_TOKENS.index(END_OF_TEXT)

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        self._bpe.encode_special_tokens = not self._parses  # here, because a pickle does not have it
        encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        size, end = self.vocab_size, self.eos_token_id
        return count_bytes(self.name, self._bpe, ids, before, vocab_size=size, end=end)

    def write(self, folder: str | os.PathLike[str]) -> None:
        _save(self._bpe, END_OF_TEXT, folder)


class FolderTokenizer(Tokenizer):
    """A Hugging Face tokenizer in a local folder; code in the folder is never run.

    Args:
        folder: of the tokenizer.
        parse_special_tokens: whether text that spells a special token becomes that token.

    Raises:
        UserError: `folder` has no tokenizer, the tokenizer needs its own code or has no end-of-sequence
            token, or transformers does not give it the ids of its `tokenizer.json`.
    """

    eos_token_id: int

    def __init__(self, folder: Path, *, parse_special_tokens: bool = False) -> None:
        self.name, self._parses = str(folder), parse_special_tokens
        self._tokenizer = load_folder(folder)
        check_file(folder, self._tokenizer)
        eos_token_id = self._tokenizer.eos_token_id
        if eos_token_id is None:
            raise UserError(
                f"tokenizer {folder} has no end-of-sequence token, which is needed at the end of documents: "
                'set "eos_token" in its tokenizer_config.json'
            )
        # not its length: ids may have gaps, and the largest one needs a row of the embedding
        self.vocab_size = max(len(self._tokenizer), 1 + max(self._tokenizer.get_vocab().values(), default=0))
        self.eos_token_id = int(eos_token_id)
        begin = self._tokenizer.bos_token_id
        if begin is not None and self._tokenizer("")["input_ids"][:1] == [begin]:
            self.begin = int(begin), str(self._tokenizer.bos_token)
        self.fingerprint = _fingerprint(folder_fingerprint(folder, self._tokenizer), parse_special_tokens)

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        # verbose=False: no warning that documents exceed the model's length; they are packed into samples.
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=not self._parses,
            return_attention_mask=False,
            verbose=False,
        )
        arrays = [np.asarray(ids, dtype=self.dtype) for ids in encoded["input_ids"]]
        if not self._parses and any((ids == self.eos_token_id).any() for ids in arrays):
            raise UserError(
                f"tokenizer {self.name} makes its end-of-document token {self._tokenizer.eos_token!r} of "
                "text that spells it, as Unigram and WordLevel tokenizers do: remove it, or set "
                "data.parse_special_tokens, which ends a document there"
            )
        return arrays

    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        size, end = self.vocab_size, self.eos_token_id
        return count_bytes(self.name, backend, ids, before, vocab_size=size, end=end)

    def decode(self, ids: list[int]) -> str:
        """The text of these ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def decode_after(self, before: list[int], ids: list[int]) -> str:
        """The text that these ids add to that of the ids before them.

        On their own, ids may have another text: some decoders take away a space at the beginning.
        """
        known, text = self.decode(before), self.decode([*before, *ids])
        while not text.startswith(known):  # the ids have changed its end, such as a space before a full stop
            known = known[:-1]
        return text.removeprefix(known)

    def special_tokens_in(self, text: str) -> list[str]:
        """The special tokens that `text` spells."""
        added = self._tokenizer.added_tokens_decoder.values()
        return [each.content for each in added if each.special and each.content in text]

    def write(self, folder: str | os.PathLike[str]) -> None:
        self._tokenizer.save_pretrained(folder)


class NoTokenizer(Tokenizer):
    """Stands for the unknown tokenizer that made the token ids of a corpus."""

    name = NO_TOKENIZER
    eos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = hashlib.sha256(f"{NO_TOKENIZER} {vocab_size}".encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        """Raise: nothing is known that turns text into ids."""
        raise TypeError(f'tokenizer "{NO_TOKENIZER}" cannot encode {len(texts)} texts')

    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:  # noqa: ARG002
        return 0

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Do nothing: the exported model has no tokenizer."""
        logger.info('data.tokenizer is "%s": no tokenizer is saved in %s', NO_TOKENIZER, folder)


def build_tokenizer(settings: DataSettings, corpus: Corpus | None = None) -> Tokenizer:
    """The tokenizer of `settings`; a BPE is loaded from the cache, or trained on the corpus.

    Not collective: a single process may call it. `corpus` is the corpus of `settings`, if already open.

    Raises:
        UserError: the tokenizer folder cannot be used, or (BPE) the corpus or the cache folder cannot.
    """
    if settings.tokenizer == BYTE_TOKENIZER:
        return ByteTokenizer()
    if settings.tokenizer == NO_TOKENIZER:
        assert settings.vocab_size is not None, "DataSettings has checked it"
        return NoTokenizer(settings.vocab_size)
    if settings.tokenizer != BPE_TOKENIZER:
        folder = Path(settings.tokenizer).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"tokenizer {settings.tokenizer!r} is neither "
                f'"{BYTE_TOKENIZER}" nor "{BPE_TOKENIZER}" nor "{NO_TOKENIZER}" nor an existing folder: '
                "set data.tokenizer to one"
            )
        return FolderTokenizer(folder, parse_special_tokens=settings.parse_special_tokens)
    assert settings.vocab_size is not None, "DataSettings has checked it"
    return train_bpe(
        corpus or open_corpus(settings),
        settings.vocab_size,
        settings.cache_dir,
        timeout=settings.build_timeout,
        parse_special_tokens=settings.parse_special_tokens,
    )


def check_same_ids(tokenizer: Tokenizer, settings: DataSettings, folder: Path, *, remedy: str) -> None:
    """Check that `tokenizer`, that of `settings`, gives the ids of the model whose tokenizer is in `folder`.

    Token ids of an unknown tokenizer cannot be compared. It warns if the one in `folder` cannot be used.

    Args:
        tokenizer: made of `settings`.
        settings: name the tokenizer in the message.
        folder: with a Hugging Face tokenizer.
        remedy: ends the message; what goes wrong, and what to set.

    Raises:
        UserError: they give other ids.
    """
    if settings.tokenizer == NO_TOKENIZER:
        return
    try:
        own = FolderTokenizer(folder, parse_special_tokens=settings.parse_special_tokens)
    except UserError as error:
        logger.warning("it is not known whether %s has data.tokenizer %s: %s", folder, tokenizer.name, error)
        return
    ends = own.eos_token_id, tokenizer.eos_token_id
    if ends[0] != ends[1] or _compared_ids(own) != _compared_ids(tokenizer):
        raise UserError(
            f"the tokenizer in {folder} gives other ids than data.tokenizer {settings.tokenizer!r}, {remedy}"
        )


def _compared_ids(tokenizer: Tokenizer) -> list[int] | None:
    return encoded(lambda: [int(number) for number in tokenizer.encode_batch([TEXT_TO_COMPARE])[0]])


def check_export(settings: DataSettings, model_type: str) -> None:
    """Check that the tokenizer of `settings` can be saved with a model of this type; it trains no BPE.

    Raises:
        UserError: it cannot, or the tokenizer folder cannot be used.
    """
    if settings.tokenizer != BPE_TOKENIZER:
        build_tokenizer(settings).check_export(model_type)
        return
    with TemporaryDirectory() as folder:  # what matters are its stages, which do not depend on the corpus
        path = Path(folder) / TOKENIZER_JSON
        path.write_text(_train(iter([TEXT_TO_COMPARE]), 2 * SMALLEST_BPE).to_str(), encoding="utf-8")
        BPETokenizer(path).check_export(model_type)


def train_bpe(
    corpus: Corpus,
    vocab_size: int,
    cache_dir: Path,
    *,
    timeout: float = WAIT_SECONDS,
    parse_special_tokens: bool = False,
) -> BPETokenizer:
    """Train a byte-level BPE on the first 256 Mi characters of `corpus`, or load it from the cache.

    `timeout` is how many seconds to wait while another process trains it. If the corpus is too small for
    `vocab_size`, the vocabulary is smaller. `parse_special_tokens` is that of `BPETokenizer`.
    """
    key = key_of((BPE_FORMAT, tokenizers.__version__, vocab_size, corpus.fingerprint))

    def build(path: Path) -> None:
        logger.info("training a BPE of %d tokens on %s, once", vocab_size, corpus.name)
        bpe = _train(_limited(corpus.documents()), vocab_size)
        path.write_text(bpe.to_str(), encoding="utf-8")

    path = cached_file(cache_dir / "tokenizers" / f"bpe-{key}.json", build, timeout=timeout)
    tokenizer = BPETokenizer(path, parse_special_tokens=parse_special_tokens)
    if tokenizer.vocab_size < vocab_size:
        logger.warning(
            "corpus %s yields a vocabulary of only %d tokens, not vocab_size %d",
            corpus.name,
            tokenizer.vocab_size,
            vocab_size,
        )
    return tokenizer


def _train(texts: Iterator[str], vocab_size: int) -> Any:
    assert vocab_size >= SMALLEST_BPE
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        # sorted, because the library's order changes between calls and would change the ids
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    return bpe


def _limited(texts: Iterator[str]) -> Iterator[str]:
    room = BPE_TRAINING_CHARACTERS
    for text in texts:
        yield text
        room -= len(text)
        if room <= 0:
            return


def _save(tokenizer: Any, eos_token: str, folder: str | os.PathLike[str]) -> None:
    from transformers import PreTrainedTokenizerFast  # slow to import, and needed at the end of a run only

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token).save_pretrained(folder)


def _fingerprint(files: str, parse_special_tokens: bool) -> str:
    """The fingerprint of a tokenizer from that of its files."""
    if parse_special_tokens:
        return files
    return hashlib.sha256(f"{files}, special tokens are text".encode()).hexdigest()
