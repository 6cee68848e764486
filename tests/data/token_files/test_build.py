"""Token files against ids that this file computes itself, also after kills at random moments."""

import json
import logging
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from forks import Forked

from megalowbit.data import cache
from megalowbit.data.corpus import Corpus
from megalowbit.data.packing import pack
from megalowbit.data.token_files import build, workers
from megalowbit.data.token_files.workers import encode_in_order
from megalowbit.data.tokenize import ByteTokenizer, train_bpe
from megalowbit.errors import UserError

TEXTS = [f"document {number} é " * (number % 13 + 1) for number in range(400)]


class Documents(Corpus):
    name = "documents"
    fingerprint = "f"

    def __init__(self, texts, fail_at=None):
        self.texts, self.fail_at, self.num_read = texts, fail_at, 0

    @property
    def share_read(self):
        return self.num_read / len(self.texts)

    def documents(self):
        for number, text in enumerate(self.texts):
            if number == self.fail_at:
                raise UserError("a record is bad")
            self.num_read = number + 1
            yield text


def ids_of(texts):
    return np.frombuffer("".join(f"{text}\0" for text in texts).encode(), np.uint8)


def token_file(folder):
    (path,) = (folder / "tokens").glob("*.npy")
    return path


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 16)


@pytest.fixture
def frequent_journals(monkeypatch, small_batches):
    monkeypatch.setattr(build, "SECONDS_BETWEEN_JOURNALS", 0.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_ids_do_not_depend_on_the_number_of_processes(tmp_path, small_batches, count):
    pack(Documents(TEXTS), ByteTokenizer(), 8, tmp_path, workers=count)
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))


def test_processes_start_by_themselves_when_a_corpus_is_large(tmp_path, small_batches, monkeypatch):
    monkeypatch.setattr(workers, "CHARACTERS_BEFORE_START", 2000)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    started = []
    monkeypatch.setattr(workers, "_start", lambda start=workers._start: started.append(1) or start())
    small = list(encode_in_order(build.batches_of(iter(TEXTS[:16])), ByteTokenizer(), None))
    assert not started
    large = list(encode_in_order(build.batches_of(iter(TEXTS)), ByteTokenizer(), None))
    assert len(started) == 2
    assert np.array_equal(np.concatenate([ids for _, ids in large]), ids_of(TEXTS))
    assert small[0].sizes == large[0].sizes == [len(text.encode()) + 1 for text in TEXTS[:16]]


def test_a_trained_bpe_works_in_other_processes(tmp_path, small_batches):
    tokenizer = train_bpe(Documents(TEXTS), 280, tmp_path)
    batches = [list(encode_in_order(build.batches_of(iter(TEXTS)), tokenizer, count)) for count in (1, 2)]
    one, two = (np.concatenate([ids for _, ids in found]) for found in batches)
    assert np.array_equal(one, two)
    assert (one == tokenizer.eos_token_id).sum() == len(TEXTS)


def test_processes_that_tokenise_do_not_import_torch():
    code = (
        "import sys, megalowbit.data.token_files.workers, megalowbit.data.tokenize; "
        "heavy = {'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_killed_is_named_with_its_documents(tmp_path, small_batches, monkeypatch):
    started = []
    start = workers._start
    monkeypatch.setattr(workers, "_start", lambda: started.append(start()) or started[-1])

    def texts():
        yield from TEXTS[:40]
        for process in started:
            process.kill()
            process.wait()
        yield from TEXTS[40:]

    corpus = Documents(TEXTS)
    corpus.documents = texts
    with pytest.raises(UserError, match=r"has ended by signal SIGKILL at 16 documents .* 'document \d+ é"):
        pack(corpus, ByteTokenizer(), 8, tmp_path, workers=2)
    assert not list((tmp_path / "tokens").iterdir())


def test_an_error_of_the_tokenizer_comes_from_its_process(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = "no id"
    with pytest.raises(RuntimeError, match=r"a process that tokenises has failed:\n(.|\n)*ValueError"):
        list(encode_in_order(iter([["a"], ["b"]]), tokenizer, 2))


@pytest.mark.parametrize("count", [1, 2])
def test_a_build_continues_after_the_documents_of_its_journal(tmp_path, frequent_journals, caplog, count):
    with pytest.raises(UserError, match="a record is bad"):
        pack(Documents(TEXTS, fail_at=250), ByteTokenizer(), 8, tmp_path, workers=count)
    (journal,) = (tmp_path / "tokens").glob(".*.partial.json")
    done = json.loads(journal.read_text())["documents"]
    assert 0 < done <= 240
    tokenizer, encoded = ByteTokenizer(), []
    encode_batch = tokenizer.encode_batch
    tokenizer.encode_batch = lambda texts: encoded.extend(texts) or encode_batch(texts)
    with caplog.at_level(logging.INFO):
        pack(Documents(TEXTS), tokenizer, 8, tmp_path)
    assert encoded == TEXTS[done:]
    assert f"continuing after {done} documents" in caplog.text
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))
    assert len(list((tmp_path / "tokens").iterdir())) == 2  # the file and its manifest


def cut(draft, journal):
    draft.write_bytes(draft.read_bytes()[:500])


def flip(draft, journal):
    content = bytearray(draft.read_bytes())
    content[300] ^= 1
    draft.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda draft, journal: draft.unlink(),
        lambda draft, journal: journal.write_text("{"),
        lambda draft, journal: journal.write_text('{"documents": 3, "tokens": "4", "crc32": 5}'),
        lambda draft, journal: journal.write_text('{"document": 3}'),
        lambda draft, journal: journal.write_text('{"documents": 3, "tokens": -4, "crc32": 0}'),
    ],
)
def test_a_draft_that_does_not_match_its_journal_is_not_continued(
    tmp_path, frequent_journals, caplog, damage
):
    with pytest.raises(UserError):
        pack(Documents(TEXTS, fail_at=250), ByteTokenizer(), 8, tmp_path)
    (journal,) = (tmp_path / "tokens").glob(".*.partial.json")
    damage(journal.with_suffix(""), journal)
    pack(Documents(TEXTS), ByteTokenizer(), 8, tmp_path)
    assert "tokenising from the beginning" in caplog.text
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))


def test_bad_records_of_a_cached_file_are_counted_against_a_smaller_limit(tmp_path):
    class Damaged(Documents):
        def documents(self):
            self.bad_records.reset()
            for text in self.texts:
                if text.startswith("bad"):
                    self.bad_records.add(UserError(text))
                else:
                    yield text

    texts = ["good " * 9, "bad 1", "good " * 9, "bad 2"]
    corpus = Damaged(texts)
    corpus.bad_records.limit = 2
    pack(corpus, ByteTokenizer(), 8, tmp_path)
    assert cache.facts_of(token_file(tmp_path)) == {
        "documents": 2, "tokens": 92, "bad_records": 2, "empty_records": 0
    }  # fmt: skip
    corpus.bad_records.limit = 1
    with pytest.raises(UserError, match=r"documents has 2 bad records, and data\.max_bad_records is 1"):
        pack(corpus, ByteTokenizer(), 8, tmp_path)


def test_progress_is_logged_with_tokens_per_second(tmp_path, small_batches, monkeypatch, caplog):
    monkeypatch.setattr(build, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO):
        pack(Documents(TEXTS), ByteTokenizer(), 8, tmp_path)
    lines = [line for line in caplog.messages if "of the corpus read" in line]
    assert len(lines) == 25
    assert lines[0].startswith(f"documents: 16 documents, {len(ids_of(TEXTS[:16])):,} tokens, ")
    assert lines[0].endswith(" tokens/s, 4% of the corpus read")
    assert f"400 documents, {len(ids_of(TEXTS)):,} tokens, " in caplog.messages[-1]


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(tmp_path, small_batches, monkeypatch, capsys):
    monkeypatch.setattr(build, "SECONDS_BETWEEN_BARS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pack(Documents(TEXTS), ByteTokenizer(), 8, tmp_path)
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown[13].startswith("[############............]  52%  208 documents, ")
    assert shown[-1] == ""


PROGRAM = """
    import sys, time
    from pathlib import Path
    from megalowbit.data.packing import pack
    from megalowbit.data.text_files.local_files import LocalCorpus
    from megalowbit.data.token_files import build
    from megalowbit.data.tokenize import ByteTokenizer

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            time.sleep(0.002)
            return super().encode_batch(texts)

    corpus, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    build.BATCH_DOCUMENTS, build.SECONDS_BETWEEN_JOURNALS = 4, 0.01
    tokenizer = ByteTokenizer() if count > 1 else Slow()
    pack(LocalCorpus(corpus), tokenizer, 8, folder, workers=count)
"""


def check_cache(folder, expected):
    """The cache has no file or the whole one; returns whether it has it, and the documents in a journal."""
    files = list((folder / "tokens").glob("*.npy")) if folder.exists() else []
    for path in files:
        assert np.array_equal(np.load(path), expected)
        assert cache._is_whole(path)
    journals = list((folder / "tokens").glob(".*.partial.json")) if folder.exists() else []
    return bool(files), max([json.loads(path.read_text())["documents"] for path in journals], default=0)


def kill_builds(folder, num_kills, count):
    """Kill builds at random moments until there were `num_kills`; returns the largest progress of each."""
    texts = [f"document {number} " * (number % 13 + 1) for number in range(1200)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    expected, seed = ids_of(texts), random.Random(7)
    place, kills, progress, resumed, whole = 0, 0, 0, 0, 0
    while kills < num_kills:
        arguments = (folder / "a.jsonl", folder / f"cache-{place}", count)
        program = Forked(folder / "program.py", *arguments, output=folder / "output")
        start, limit = time.monotonic(), seed.uniform(0.0, 1.2)
        while program.poll() is None and time.monotonic() - start < limit:
            time.sleep(0.002)
        was_running = program.poll() is None
        program.kill()
        code = program.wait()
        kills += was_running
        assert was_running or code == 0, (folder / "output").read_text()
        is_whole, done = check_cache(folder / f"cache-{place}", expected)
        assert is_whole or done >= progress  # nothing that a journal has noted is lost
        resumed += done > progress > 0
        progress = 0 if is_whole else done
        whole += is_whole
        place += is_whole
    last = Forked(folder / "program.py", folder / "a.jsonl", folder / f"cache-{place}", count,
                  output=folder / "output")  # fmt: skip
    assert last.wait() == 0, (folder / "output").read_text()
    assert check_cache(folder / f"cache-{place}", expected) == (True, 0)
    names = [path.name for path in (folder / f"cache-{place}" / "tokens").iterdir()]
    assert sorted(name[-14:] for name in names if not name.endswith(".npy")) == [".manifest.json"]
    return whole, resumed


def test_kills_leave_no_cache_or_a_whole_one(tmp_path):
    kill_builds(tmp_path, 6, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_hundred_kills_leave_no_cache_or_a_whole_one(tmp_path, count):
    whole, resumed = kill_builds(tmp_path, 100, count)
    assert whole + resumed  # the kills came in the middle of builds


def test_workers_end_with_a_killed_parent(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "word " * 50}) + "\n" for _ in range(4000)))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    program = Forked(tmp_path / "program.py", tmp_path / "a.jsonl", tmp_path / "cache", 2,
                     output=tmp_path / "output")  # fmt: skip
    end = time.monotonic() + 60
    children = []
    while len(children) < 2 and time.monotonic() < end and program.poll() is None:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(program.pid)], capture_output=True, text=True
        )
        children = [int(each) for each in listed.stdout.split()]
        time.sleep(0.01)
    assert len(children) == 2
    program.kill()
    program.wait()
    while children and time.monotonic() < end:
        children = [child for child in children if Path(f"/proc/{child}").exists()]
        time.sleep(0.05)
    assert not children
