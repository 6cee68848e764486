"""`tools/preprocess_data.py`: the files it writes, and what it refuses in one line."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from programs import call_main

from launchers import ROOT, check_refusal
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files.megatron import MegatronCorpus
from megalowbit.data.tokenize import train_bpe

TOOL = "tools/preprocess_data.py"
TEXTS = [f"document {number} é" for number in range(1200)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:5]}) + "\n" for text in TEXTS))
    return path


def contents(prefix):
    corpus = MegatronCorpus(prefix)
    return [corpus.document(number).tobytes() for number in range(corpus.num_documents)]


def expected(texts, end=""):
    return [np.frombuffer((text + end).encode(), np.uint8).astype("<u2").tobytes() for text in texts]


def test_it_writes_the_documents_of_each_field_as_started_from_a_shell(tmp_path, source):
    done = subprocess.run(
        [
            *(sys.executable, TOOL, "--input", source, "--output-prefix", tmp_path / "new" / "out"),
            *("--json-keys", "text", "title", "--tokenizer", "byte", "--append-eod", "--workers", "2"),
        ],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "new" / "out_text_document") == expected(TEXTS, "\0")
    assert contents(tmp_path / "new" / "out_title_document") == expected([text[:5] for text in TEXTS], "\0")
    num_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    line = f"{tmp_path}/new/out_text_document: 1,200 documents, {num_tokens:,} tokens as uint16\n"
    assert done.stdout.startswith(line)
    assert " tokens/s" in done.stderr


def wait_for(condition, process):
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_interrupt_is_one_line_and_leaves_no_files(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "new"
    source.write_text('{"text": "a"}\n' * 2_000_000)  # takes many seconds
    process = subprocess.Popen(
        [
            *(sys.executable, TOOL, "--input", source, "--output-prefix", out / "out"),
            *("--tokenizer", "byte", "--workers", "2"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: any(file.stat().st_size for file in out.glob(".out_text_document.*.bin.tmp")), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    output, _ = process.communicate(timeout=200)
    lines = [line for line in output.splitlines() if " tokens/s" not in line]  # of a slow machine's progress
    assert lines == ["interrupted before the end: not all files are written"]
    assert process.returncode == 130
    assert list(out.iterdir()) == []


def test_documents_have_no_end_without_the_flag(tmp_path, source, capsys):
    arguments = ("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer-model", "byte")
    done = call_main(TOOL, *arguments, "--tokenizer-type", "HuggingFaceTokenizer", capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out_text_document") == expected(TEXTS)


def test_a_tokenizer_of_a_folder_gives_its_ids(tmp_path, source, capsys):
    tokenizer = train_bpe(LocalCorpus(source), 300, tmp_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = ("--input", source, "--output-prefix", tmp_path / "out", "--append-eod")
    done = call_main(TOOL, *arguments, "--tokenizer", tmp_path / "tokenizer", capsys=capsys)
    assert done.returncode == 0, done.stderr
    ids = [[*each.tolist(), 0] for each in tokenizer.encode_batch(TEXTS)]
    corpus = MegatronCorpus(tmp_path / "out_text_document")
    assert [corpus.document(number).tolist() for number in range(corpus.num_documents)] == ids


@pytest.mark.parametrize("parses", [False, True])
def test_spelled_special_tokens_are_text_unless_the_flag_is_given(tmp_path, source, parses, capsys):
    tokenizer = train_bpe(LocalCorpus(source), 300, tmp_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "spelled.txt").write_text("one<|endoftext|>two")
    arguments = ("--input", tmp_path / "spelled.txt", "--output-prefix", tmp_path / "out", "--append-eod")
    flags = ["--parse-special-tokens"] * parses
    done = call_main(TOOL, *arguments, "--tokenizer", tmp_path / "tokenizer", *flags, capsys=capsys)
    assert done.returncode == 0, done.stderr
    ids = MegatronCorpus(tmp_path / "out_text_document").document(0).tolist()
    assert ids[-1] == 0
    assert ids.count(0) == 1 + parses


def test_bad_records_are_left_out_up_to_the_bound(tmp_path, source, capsys):
    source.write_text(source.read_text() + "{\n[]\n")
    arguments = ("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", "byte")
    check_refusal(call_main(TOOL, *arguments, capsys=capsys), "a.jsonl is not JSON: line 1201")
    assert not list(tmp_path.glob("*out*"))
    done = call_main(TOOL, *arguments, "--max-bad-records", 2, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out_text_document") == expected(TEXTS)


def test_an_error_in_any_field_leaves_no_files(tmp_path, source, capsys):
    arguments = ("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", "byte")
    done = call_main(TOOL, *arguments, "--json-keys", "text", "missing", capsys=capsys)
    check_refusal(done, "unknown text_field 'missing'")
    assert list(tmp_path.iterdir()) == [source]


def test_a_field_is_written_once(tmp_path, source, capsys):
    arguments = ("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", "byte")
    done = call_main(TOOL, *arguments, "--json-keys", "text", "title", "text", capsys=capsys)
    check_refusal(done, "--json-keys 'text' is given 2 times: give it once")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--tokenizer": "words"}, "--tokenizer 'words' is neither \"byte\" nor an existing folder"),
        ({"--tokenizer": "bpe"}, "--tokenizer 'bpe' is neither"),
        ({"--workers": "0"}, "--workers 0 is not valid: give 1 or more"),
        ({"--max-bad-records": "-1"}, "--max-bad-records -1 is not valid: give 0 or more"),
        ({"--json-keys": "body"}, "a.jsonl, line 1: unknown text_field 'body'"),
        ({"--input": "nowhere.jsonl"}, "corpus nowhere.jsonl does not exist"),
        ({"--json-keys": "a/b"}, "--json-keys 'a/b' cannot be in the name of a file: rename the field"),
        ({"--output-prefix": ""}, "names no file: give one, as data/web"),
        ({"--output-prefix": "/"}, "--output-prefix '/' names no file"),
        ({"--output-prefix": "/proc/none/out"}, "--output-prefix /proc/none/out_text_document: "),
    ],
)
def test_mistakes_are_one_line(tmp_path, source, capsys, changes, message):
    values = {"--input": source, "--output-prefix": tmp_path / "out", "--tokenizer": "byte", **changes}
    done = call_main(TOOL, *(each for pair in values.items() for each in pair), capsys=capsys)
    check_refusal(done, message)
