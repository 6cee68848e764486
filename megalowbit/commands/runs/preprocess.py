r"""Tokenise text into Megatron's .bin and .idx files.

    megalowbit preprocess --input books.jsonl --output-prefix books --tokenizer byte --append-eod
    megalowbit preprocess --input 'shards/*.jsonl.zst' --output-prefix data/web \
        --tokenizer models/llama --append-eod --workers 32

Writes PREFIX_KEY_document.bin and .idx for each of --json-keys, with the names and flags of Megatron-LM's
tool of this name. Both Megatron-LM and data.corpus read them. See docs/data.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files.build import Journal, Progress, batches_of
from megalowbit.data.token_files.megatron import MegatronWriter
from megalowbit.data.token_files.workers import encode_in_order
from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer, Tokenizer
from megalowbit.errors import UserError, shown
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.command_line import EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit preprocess")
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="PATH",
        help=".txt, .jsonl, .parquet or .arrow file (text also as .gz or .zst), a folder or a glob of them",
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="path of the files without _KEY_document.bin",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields or columns with text; each gets a pair of files (default: text)",
    )
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        required=True,
        metavar="NAME",
        help="byte, or a folder with a Hugging Face tokenizer",
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=["HuggingFaceTokenizer"],
        help="may be given, as to Megatron-LM's tool; it changes nothing",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="append the end-of-document id to each document"
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="let text that spells a special token become that token, as Megatron-LM's tool does",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that tokenise (default: number of CPUs, at most 16, once the input is larger than "
        "32 Mi characters)",
    )
    parser.add_argument(
        "--max-bad-records",
        type=int,
        default=0,
        metavar="N",
        help="how many records that are not text may be left out (default: 0)",
    )
    return parser


def tokenizer_of(name: str, *, parse_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer of this name.

    Raises:
        UserError: it is no name and no folder with a tokenizer.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if name == "bpe" or not folder.is_dir():
        raise UserError(f'--tokenizer {shown(name)} is neither "byte" nor an existing folder: name one')
    return FolderTokenizer(folder, parse_special_tokens=parse_special_tokens)


def write_all(options: argparse.Namespace, tokenizer: Tokenizer) -> list[str]:
    """Write the pairs of files of all fields, or none if there is an error; returns a line about each.

    Raises:
        UserError: the input cannot be read, has too many bad records or no text, or a file cannot be written.
    """
    with ExitStack() as drafts:  # files get their names when it ends without an error
        return [write_documents(options, key, tokenizer, drafts) for key in options.json_keys]


def write_documents(options: argparse.Namespace, key: str, tokenizer: Tokenizer, drafts: ExitStack) -> str:
    """Write the pair of files of one field, which has its name at the end of `drafts`."""
    corpus = LocalCorpus(options.input.expanduser(), text_field=key, max_bad_records=options.max_bad_records)
    prefix = options.output_prefix.expanduser()
    prefix = prefix.with_name(f"{prefix.name}_{key}_document")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-prefix {prefix}: {error.strerror}: name another folder") from error
    writer = drafts.enter_context(MegatronWriter(prefix, tokenizer.vocab_size))
    with Progress(corpus) as progress:
        encoded = encode_in_order(batches_of(corpus), tokenizer, options.workers, has_end=options.append_eod)
        for sizes, ids in encoded:
            start = 0
            for size in sizes:
                writer.add_document(ids[start : start + size])
                start += size
            progress.show(Journal(writer.num_documents, writer.num_tokens))
        if not writer.num_tokens:
            raise UserError(f"--input {options.input} contains no text in {key!r}: name other data")
    bad = corpus.bad_records
    progress.summarise(Journal(writer.num_documents, writer.num_tokens), bad.count, bad.empty)
    return (
        f"{prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens as {writer.dtype.name}"
    )


def check_options(options: argparse.Namespace) -> None:
    """Check what the parser does not.

    Raises:
        UserError: a value is not valid.
    """
    for flag, value, least in (
        ("--workers", options.workers, 1),
        ("--max-bad-records", options.max_bad_records, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} {value} is not valid: give {least} or more")
    if not options.output_prefix.name:
        raise UserError(
            f"--output-prefix {shown(str(options.output_prefix))} names no file: give one, as data/web"
        )
    for key, count in Counter(options.json_keys).items():
        if "/" in key:
            raise UserError(f"--json-keys {shown(key)} cannot be in the name of a file: rename the field")
        if count > 1:
            raise UserError(f"--json-keys {shown(key)} is given {count} times: give it once")


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options = build_parser().parse_args(arguments)
        check_options(options)
        tokenizer = tokenizer_of(options.tokenizer, parse_special_tokens=options.parse_special_tokens)
        for line in write_all(options, tokenizer):
            print(line)
    except KeyboardInterrupt:
        print("interrupted before the end: not all files are written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0
