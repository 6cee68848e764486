"""The `"data"` section of the configuration: text, tokenizer and sequence length.

This module is used before torch is imported, so it checks only types and combinations. `sources.open_corpus`
and `tokenize.build_tokenizer` check that files and folders exist.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from megalowbit.errors import UserError
from megalowbit.values import SettingsModel

BYTE_TOKENIZER = "byte"
BPE_TOKENIZER = "bpe"
# A byte-level BPE starts from the 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
# Far above any useful size; if the library cannot allocate, it ends the process without an exception.
LIMIT_OF_BPE = 2**24


def default_cache_dir() -> Path:
    """`$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else `~/.cache/megalowbit`."""
    own = os.environ.get("MEGALOWBIT_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megalowbit"


class DataSettings(SettingsModel):
    """`"data"`: the text and how it becomes sequences of token ids.

    Attributes:
        corpus: `"stdlib"` (the sources of the running Python's standard library), a `.txt`, `.jsonl` or
            `.parquet` file, a folder of them, or the name of a Hugging Face data set.
        corpus_config: configuration of a Hugging Face data set (`"wikitext-2-raw-v1"`).
        split: split of a Hugging Face data set, in its own notation (`"train[:10%]"`).
        text_field: name of the field or column that holds the text (jsonl, parquet, Hugging Face).
        tokenizer: `"byte"`, `"bpe"` (trained on the corpus) or a folder with a Hugging Face tokenizer.
        vocab_size: size of the vocabulary to train; for `"bpe"` only.
        sequence_length: tokens per sample.
        cache_dir: where tokenised corpora and trained tokenizers are kept.
        seed: decides the order of the samples.
    """

    model_config = ConfigDict(validate_default=True)

    corpus: str = Field(default="stdlib", min_length=1)
    corpus_config: str | None = None
    split: str = Field(default="train", min_length=1)
    text_field: str = Field(default="text", min_length=1)
    tokenizer: str = Field(default=BYTE_TOKENIZER, min_length=1)
    vocab_size: int | None = Field(default=None, ge=SMALLEST_BPE, lt=LIMIT_OF_BPE)
    sequence_length: int = Field(ge=2, description="tokens per sample, e.g. 1024")
    cache_dir: Path = Field(default_factory=default_cache_dir)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _vocab_size_belongs_to_bpe(self) -> DataSettings:
        is_bpe = self.tokenizer == BPE_TOKENIZER
        if is_bpe and self.vocab_size is None:
            raise UserError(
                'tokenizer "bpe" needs vocab_size, the size of the vocabulary to train, e.g. 8192'
            )
        if not is_bpe and self.vocab_size is not None:
            raise UserError(
                f'vocab_size {self.vocab_size} is for tokenizer "bpe" only, not {self.tokenizer!r}: remove it'
            )
        return self
