"""Settings of the section `data`: the corpus, the tokenizer and the sequence length.

Imported without torch. Only types and combinations are checked here; `sources.open_corpus` and
`tokenize.build_tokenizer` check the files and folders when they open them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

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
BLEND = "blend"  # `data.corpus` of a run that names its text in `data.sources`
SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")  # no dots: `--set` separates keys by them
AMOUNTS = ("tokens", "epochs")  # of a source, instead of a weight
GLOB = re.compile(r"[*?\[]")


def kind_of(file: str | Path) -> str | None:
    """Which of `TEXT_KINDS` a file is, by its name in any case; None if it is none of them."""
    path = Path(file)
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix.lower()
        return ".jsonl" if inner == COMPRESSED_JSON else inner if inner in (".txt", ".jsonl") else None
    return suffix if suffix in TEXT_KINDS else None


def compression_of(file: str | Path) -> str:
    """Which of `COMPRESSIONS` a file has, by its name in any case; "" if it has none."""
    suffix = Path(file).suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


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


def _check_stream(value: Any) -> Any:
    """Reject in one line what would be an error of each member of the union."""
    if value is not None and value != "all" and not (type(value) is int and value >= 1):
        raise UserError('write "all", or a number of documents, 1 or more')
    return value


Stream = Annotated[Annotated[int, Field(ge=1)] | Literal["all"] | None, BeforeValidator(_check_stream)]


class ValidationSource(SettingsModel):
    """The text for validation: another corpus, another split of a data set, or a share of the documents."""

    corpus: str | None = Field(
        default=None,
        min_length=1,
        description="other text, named like `data.corpus`",
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
    stream: Stream = Field(
        default=None,
        description="`data.stream` of this corpus or split. A `share` is streamed if `data.corpus` is",
        json_schema_extra=unit("documents"),
    )
    text_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field or column that holds its text. `null`: `data.text_field`",
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
        if self.share is not None and self.stream is not None:
            raise UserError("share is of data.corpus, so stream has no effect here: set data.stream")
        if self.share is not None and self.text_field is not None:
            raise UserError("share is of data.corpus, so text_field has no effect here: set data.text_field")
        if self.share is None and self.corpus is None and self.split is None:
            raise UserError(
                "it names no text: set corpus (other text), split (of a data set) or share (of the documents)"
            )
        if self.corpus_config is not None and self.corpus is None:
            raise UserError(f"corpus_config = {self.corpus_config!r} needs corpus")
        return self


class BlendSource(SettingsModel):
    """One of several texts for training, and how much of the run it gives.

    `weight` is a share: of all samples, or of those that sources with `tokens` or `epochs` leave. Set one of
    the three.
    """

    corpus: str = Field(min_length=1, description="the text, named like `data.corpus`")
    corpus_config: str | None = Field(
        default=None, description="configuration of `corpus`, if it is a Hugging Face data set"
    )
    split: str = Field(
        default="train", min_length=1, description="split of `corpus`, if it is a Hugging Face data set"
    )
    stream: Stream = Field(
        default=None, description="`data.stream` of this source", json_schema_extra=unit("documents")
    )
    text_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field or column that holds the text. `null`: `data.text_field`",
    )
    weight: float | None = Field(
        default=None,
        ge=0,
        description="share of the samples, in proportion to the other weights; 0: none, until a phase or a "
        "resumed run says otherwise",
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="how many tokens it gives in the whole run",
        json_schema_extra=unit("tokens"),
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="how often the whole run reads it, for example 1.5",
        json_schema_extra=unit("epochs"),
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="it is an error if the run would read it more often",
        json_schema_extra=unit("epochs"),
    )

    @model_validator(mode="after")
    def _has_one_measure(self) -> BlendSource:
        measures = [name for name in ("weight", *AMOUNTS) if getattr(self, name) is not None]
        if len(measures) != 1:
            found = " and ".join(measures) or "none"
            raise UserError(f"it has {found} of weight, tokens and epochs: set one of them")
        return self


class BlendPhase(SettingsModel):
    """Weights that replace those of `data.sources` from a step on."""

    from_step: int = Field(
        ge=1, description="optimizer steps before the phase begins", json_schema_extra=unit("steps")
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        description="the weight of each source, by its name"
    )


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
    stream: Stream = Field(
        default=None,
        description="tokenise a Hugging Face data set while it is read from the network, without a copy: "
        '`"all"` documents, or the first so many. `null`: download it',
        json_schema_extra=unit("documents"),
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
    parse_special_tokens: bool = Field(
        default=False,
        description="whether text that spells a special token of the tokenizer, such as `<|endoftext|>`, "
        "becomes that token; the end-of-document token then ends a document. `byte` and `none` have no such "
        "text",
    )
    sequence_length: int = Field(
        ge=2, description="tokens per sample, e.g. 1024", json_schema_extra=unit("tokens")
    )
    packing: Literal["wrapped", "documents", "best_fit"] = Field(
        default="wrapped",
        description="`wrapped`: samples are cut from the sequence of all documents, and attention does not "
        "stop at their ends. `documents`: the same samples, but positions restart and attention begins "
        "again with each document. `best_fit`: as `documents`, but documents that fit into a sample are not "
        "cut; the rest of a sample is padded",
    )
    eod_mask_loss: bool = Field(
        default=False,
        description="whether the first token of a document is no label, because only the end-of-document "
        "id before it would predict it",
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="folder for tokenised corpora, trained tokenizers, plans of `best_fit`, and digests of "
        "large corpora",
        json_schema_extra={
            "shown_default": "`$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else "
            "`~/.cache/megalowbit`"
        },
    )
    max_bad_records: int = Field(
        default=0,
        ge=0,
        description="how many records may be left out because they are not text (invalid "
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
    sources: dict[str, BlendSource] | None = Field(
        default=None,
        description="several texts instead of `corpus`, by a name for each: a blend",
    )
    phases: tuple[BlendPhase, ...] = Field(
        default=(), description="weights of the sources that change in the course of the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_a_blend(cls, values: Any) -> Any:
        sources = values.get("sources") if isinstance(values, Mapping) else None
        if not isinstance(sources, Mapping):
            return values
        # in one order, so that the order in a file means nothing
        return {"corpus": BLEND, **values, "sources": {name: sources[name] for name in sorted(sources)}}

    @model_validator(mode="after")
    def _is_one_corpus_or_a_blend(self) -> DataSettings:
        if self.sources is None:
            if self.corpus == BLEND or self.phases:
                what = f'corpus "{BLEND}"' if self.corpus == BLEND else "phases"
                raise UserError(f"{what} needs sources: name the texts there")
            return self
        if self.corpus != BLEND:
            raise UserError(f"corpus is {self.corpus!r}, and sources are set, too: set one of them")
        defaults = {"corpus_config": None, "split": "train", "stream": None}
        for name in [key for key, default in defaults.items() if getattr(self, key) != default][:1]:
            raise UserError(f"{name} has no effect on sources: set it in those that it is for")
        _check_weights(self.sources, self.phases)
        return self

    @property
    def separates_documents(self) -> bool:
        """Whether the documents of a sample do not see each other."""
        return self.packing != "wrapped"

    @property
    def num_labels_varies(self) -> bool:
        """Whether samples have different numbers of labels."""
        return self.packing == "best_fit" or self.eod_mask_loss

    @property
    def needs_ends(self) -> bool:
        """Whether batches depend on where documents end."""
        return self.separates_documents or self.eod_mask_loss

    def describe_packing(self) -> str:
        """`packing documents, eod_mask_loss`; empty if batches do not depend on documents."""
        return ", ".join(
            [f"packing {self.packing}"] * self.separates_documents + ["eod_mask_loss"] * self.eod_mask_loss
        )

    @model_validator(mode="after")
    def _knows_where_documents_end(self) -> DataSettings:
        if self.tokenizer == NO_TOKENIZER and self.needs_ends:
            what = "eod_mask_loss" if self.eod_mask_loss else f'packing "{self.packing}"'
            raise UserError(
                f'{what} needs the end-of-document id, which tokenizer "{NO_TOKENIZER}" does not know: name '
                "the folder of the tokenizer"
            )
        return self

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


def _check_weights(sources: Mapping[str, BlendSource], phases: tuple[BlendPhase, ...]) -> None:
    """Reject names that are no names of columns, weights without effect, and phases that do not fit."""
    if not sources:
        raise UserError("sources is empty: name a text there, or set corpus")
    for name in sources:
        if not SOURCE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} in sources is not a name: use up to 64 letters, digits, hyphens and "
                "underscores, and no hyphen first"
            )
    weights = {name: each.weight for name, each in sources.items()}
    if not any(each is None or each > 0 for each in weights.values()):
        raise UserError("all weights in sources are 0: give one of them a positive weight")
    if not phases:
        return
    amounts = [name for name, each in weights.items() if each is None]
    if amounts:
        raise UserError(f"phases change weights, and sources.{amounts[0]} has none: give all of them weights")
    for phase in phases:
        where = f"the phase from step {phase.from_step}"
        if unknown := [*phase.weights.keys() - weights.keys()]:
            raise UserError(f"{where} names {min(unknown)!r}, which is not in sources: {', '.join(sources)}")
        if missing := [name for name in sources if name not in phase.weights]:
            raise UserError(f"{where} has no weight for {missing[0]}: give it one, or 0")
        if not any(phase.weights.values()):
            raise UserError(f"{where} has only weights of 0: give one source a positive weight")
    for earlier, later in pairwise(phases):
        if later.from_step <= earlier.from_step:
            raise UserError(
                f"the phase from step {later.from_step} follows that from step {earlier.from_step}: put them "
                "in the order of their steps"
            )
