"""Settings of the section `data`: the corpus, the tokenizer and the sequence length.

Imported without torch. Only types and combinations are checked here; `sources.open_corpus` and
`tokenize.build_tokenizer` check the files and folders when they open them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from megalowbit.errors import UserError
from megalowbit.values import SettingsModel, unit

BYTE_TOKENIZER = "byte"
BPE_TOKENIZER = "bpe"
NO_TOKENIZER = "none"  # for token ids whose tokenizer is not at hand
# A byte-level BPE starts from the 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
# Far above any practical size. If the tokenizers library cannot allocate memory, it aborts the process.
LIMIT_OF_BPE = 2**24
TEXT_KINDS = (".txt", ".jsonl", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")  # of .txt and .jsonl; parquet and arrow compress inside
COMPRESSED_JSON = ".json"  # common for compressed JSON lines; an uncompressed .json file is rarely text
TOKEN_SUFFIXES = (".bin", ".idx")
GLOB = re.compile(r"[*?\[]")


def kind_of(file: str | Path) -> str | None:
    """Which of `TEXT_KINDS` a file is, by its name; None if it is none of them."""
    path = Path(file)
    if path.suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix
        return ".jsonl" if inner == COMPRESSED_JSON else inner if inner in (".txt", ".jsonl") else None
    return path.suffix if path.suffix in TEXT_KINDS else None


def names_files(corpus: str) -> bool:
    """Whether `data.corpus` looks like files, which may not exist: it has a known suffix or is a glob."""
    return (
        kind_of(corpus) is not None
        or Path(corpus).suffix in TOKEN_SUFFIXES
        or GLOB.search(corpus) is not None
    )


def is_token_prefix(path: Path) -> bool:
    """Whether Megatron's files lie at `path`, which has neither of their suffixes."""
    return any(Path(f"{path}{suffix}").exists() for suffix in TOKEN_SUFFIXES)


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
        description="`stdlib` (the source files of Python's standard library), a `.txt`, `.jsonl`, "
        "`.parquet` or `.arrow` file (text also as `.gz` or `.zst`), a folder or a glob of such files, the "
        "prefix of Megatron's `.bin` and `.idx` files, or the name of a Hugging Face data set",
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
        description="the field or column that holds the text (JSON lines, parquet, arrow, Hugging Face)",
    )
    tokenizer: str = Field(
        default=BYTE_TOKENIZER,
        min_length=1,
        description="`byte`, `bpe` (trained on the corpus), a folder with a Hugging Face tokenizer, or, for "
        "token ids in `.bin` and `.idx` files, `none`",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        lt=LIMIT_OF_BPE,
        description="`bpe`: size of the vocabulary to train, at least 257; `none`: number of token ids. "
        "Required for these two, and for them only",
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
    max_bad_records: int = Field(
        default=0,
        ge=0,
        description="how many records of local files may be left out because they are not text (invalid "
        "UTF-8 or JSON, a missing field, null, too large). One more is an error. 0: the first one is",
        json_schema_extra=unit("records"),
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="processes that tokenise a corpus. 1: only the process that reads it. `null`: the number "
        "of CPUs, at most 16, once a corpus is larger than 32 Mi characters",
        json_schema_extra=unit("processes"),
    )
    build_timeout: float = Field(
        default=3600,
        gt=0,
        description="how long to wait while another process tokenises the same corpus",
        json_schema_extra=unit("s"),
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
    def _vocab_size_belongs_to_its_tokenizers(self) -> DataSettings:
        needs = {
            BPE_TOKENIZER: "the size of the vocabulary to train, e.g. 8192",
            NO_TOKENIZER: "the number of token ids, e.g. 50257",
        }
        if self.tokenizer in needs and self.vocab_size is None:
            raise UserError(f'tokenizer "{self.tokenizer}" needs vocab_size, {needs[self.tokenizer]}')
        if self.tokenizer not in needs and self.vocab_size is not None:
            raise UserError(
                f'vocab_size {self.vocab_size} is for tokenizers "bpe" and "none" only, not '
                f"{self.tokenizer!r}: remove it"
            )
        if self.tokenizer == BPE_TOKENIZER and (self.vocab_size or 0) < SMALLEST_BPE:
            raise UserError(
                f'vocab_size {self.vocab_size} is too small for tokenizer "bpe": set {SMALLEST_BPE} or more, '
                "for the 256 bytes and the end-of-document token"
            )
        return self
