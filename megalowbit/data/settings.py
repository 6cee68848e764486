"""Settings of the section `data`: the corpus, the tokenizer and the sequence length.

Imported without torch. Only types and combinations are checked here; `sources.open_corpus` and
`tokenize.build_tokenizer` check the files and folders when they open them.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from megalowbit.errors import UserError
from megalowbit.values import SettingsModel, unit

BYTE_TOKENIZER = "byte"
BPE_TOKENIZER = "bpe"
# A byte-level BPE starts from the 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
# Far above any practical size. If the tokenizers library cannot allocate memory, it aborts the process.
LIMIT_OF_BPE = 2**24


def default_cache_dir() -> Path:
    """`$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else `~/.cache/megalowbit`."""
    own = os.environ.get("MEGALOWBIT_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megalowbit"


class ValidationSource(SettingsModel):
    """The text for validation: another corpus, another split of a data set, or a share of the documents."""

    corpus: str | None = Field(
        default=None,
        min_length=1,
        description="other text, named like `data.corpus`. Its text is in the column `data.text_field`, too",
    )
    corpus_config: str | None = Field(
        default=None, description="configuration of `corpus`, if it is a Hugging Face data set"
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="split of `corpus`, or without one, another split of `data.corpus`: `validation`. For "
        "Hugging Face data sets only",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="hold out this share of the documents of `data.corpus`; a hash of its text decides about "
        "a document. Training does not read these documents",
        json_schema_extra=unit("share"),
    )

    @model_validator(mode="after")
    def _names_one_source(self) -> ValidationSource:
        if self.share is not None and (self.corpus is not None or self.split is not None):
            raise UserError("share is set, and also corpus or split: name one of them")
        if self.share is None and self.corpus is None and self.split is None:
            raise UserError(
                "it names no text: set corpus (other text), split (of a data set) or share (of the documents)"
            )
        if self.corpus_config is not None and self.corpus is None:
            raise UserError(f"corpus_config = {self.corpus_config!r} needs corpus")
        return self


class DataSettings(SettingsModel):
    """The text, and how it becomes sequences of token ids."""

    model_config = ConfigDict(validate_default=True)

    corpus: str = Field(
        default="stdlib",
        min_length=1,
        description="`stdlib` (the source files of Python's standard library), a `.txt`, `.jsonl` or "
        "`.parquet` file, a folder of such files, or the name of a Hugging Face data set",
    )
    corpus_config: str | None = Field(
        default=None, description="configuration of a Hugging Face data set, such as `wikitext-2-raw-v1`"
    )
    split: str = Field(
        default="train",
        min_length=1,
        description="split of a Hugging Face data set, in that library's notation: `train[:10%]`",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="the field or column that holds the text (JSON lines, parquet, Hugging Face)",
    )
    tokenizer: str = Field(
        default=BYTE_TOKENIZER,
        min_length=1,
        description="`byte`, `bpe` (trained on the corpus), or a folder with a Hugging Face tokenizer",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=SMALLEST_BPE,
        lt=LIMIT_OF_BPE,
        description="size of the vocabulary to train; required for `bpe`, and for `bpe` only",
        json_schema_extra=unit("tokens"),
    )
    sequence_length: int = Field(
        ge=2, description="tokens per sample, e.g. 1024", json_schema_extra=unit("tokens")
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="folder for tokenised corpora and trained tokenizers",
        json_schema_extra={
            "shown_default": "`$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else "
            "`~/.cache/megalowbit`"
        },
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of the order of the samples. In a pretraining run the default is `run.seed`",
    )

    validation: ValidationSource | None = Field(
        default=None,
        description="text on which the model is evaluated but not trained; off unless set",
    )

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
