"""Token files against ids that this file computes itself, also after kills at random moments."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from forks import Forked, fork_server
from quick_cases import slow_except

from megalowbit.data.cache import built_files, digests
from megalowbit.data.corpus import Corpus, DocumentShare
from megalowbit.data.packing import pack
from megalowbit.data.text_files import local_files
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files import build, workers
from megalowbit.data.token_files.workers import encode_in_order
from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer, train_bpe
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


@pytest.mark.parametrize("count", slow_except([1, 3], [1, 2, 3]))
def test_the_ids_do_not_depend_on_the_number_of_processes(tmp_path, small_batches, count):
    pack(Documents(TEXTS), ByteTokenizer(), 8, tmp_path, workers=count)
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))


@pytest.mark.parametrize("is_of_a_folder", [False, True])
def test_a_trained_bpe_works_in_other_processes(tmp_path, small_batches, is_of_a_folder):
    tokenizer = train_bpe(Documents(TEXTS), 280, tmp_path)
    if is_of_a_folder:
        tokenizer.save_pretrained(tmp_path / "folder")
        tokenizer = FolderTokenizer(tmp_path / "folder")
    documents = Documents(TEXTS)
    batches = [list(encode_in_order(build.batches_of(documents), tokenizer, count)) for count in (1, 2)]
    one, two = (np.concatenate([ids for _, ids in found]) for found in batches)
    assert np.array_equal(one, two)
    assert (one == tokenizer.eos_token_id).sum() == len(TEXTS)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "if memory was short"),
        pytest.param(signal.SIGTERM, "start again", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_is_named_with_its_documents(
    tmp_path, small_batches, monkeypatch, number, remedy
):
    started = []
    start = workers._start
    monkeypatch.setattr(workers, "_start", lambda: started.append(start()) or started[-1])

    def texts():
        yield from TEXTS[:40]
        for process in tuple(started):  # not the one that looks for the document
            process.send_signal(number)
            process.wait()
        yield from TEXTS[40:]

    corpus = Documents(TEXTS)
    corpus.documents = texts
    said = (
        rf"has ended by signal {number.name} at 16 documents, from document \d+ of corpus documents to "
        rf"document \d+ of corpus documents, each of which a new process has tokenised: {remedy}"
    )
    with pytest.raises(UserError, match=said):
        pack(corpus, ByteTokenizer(), 8, tmp_path, workers=2)
    assert not list((tmp_path / "tokens").iterdir())


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


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of two files of long ago, so that an edit gives them another time."""
    monkeypatch.setattr(digests, "NS_UNTIL_SETTLED", -(10**9))
    folder = tmp_path / "files"
    folder.mkdir()
    for name, texts in (("a", TEXTS[:200]), ("b", TEXTS[200:])):
        write_jsonl(folder / f"{name}.jsonl", texts)
        os.utime(folder / f"{name}.jsonl", (1e9, 1e9))
    return folder


def edit_at(corpus, place, edit):
    """Let `edit` happen just before document `place` is read."""
    documents = corpus.documents

    def edited():
        for number, text in enumerate(documents()):
            if number == place:
                edit()
            yield text

    corpus.documents = edited


@pytest.mark.parametrize(
    "wrap", [lambda corpus: corpus, lambda corpus: DocumentShare(corpus, 1e-9, is_held_out=False)]
)
@pytest.mark.parametrize(
    ("name", "place"), [("a.jsonl", 0), ("a.jsonl", 150), ("b.jsonl", 20), ("b.jsonl", 390)]
)
def test_a_file_edited_while_it_is_tokenised_leaves_no_tokens(
    tmp_path, frequent_journals, files, name, place, wrap
):
    corpus, content = LocalCorpus(files), (files / name).read_text()
    edit_at(corpus, place, lambda: (files / name).write_text(content.replace("document", "DOCUMENT")))
    with pytest.raises(UserError, match=rf"{name} changed while it was read: start again"):
        pack(wrap(corpus), ByteTokenizer(), 8, tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []
    (files / name).write_text(content)
    pack(wrap(LocalCorpus(files)), ByteTokenizer(), 8, tmp_path)
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))


def replace_by_a_copy(path):
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def edit_and_restore_its_time(path):
    found = path.stat()
    path.write_text(path.read_text().replace("document", "DOCUMENT"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.link(path, path.with_name("link")),
        lambda path: path.chmod(0o640),
        replace_by_a_copy,
        edit_and_restore_its_time,
    ],
)
def test_only_a_change_of_content_counts_if_inode_or_status_are_new(
    tmp_path, frequent_journals, files, change
):
    corpus = LocalCorpus(files)
    corpus.fingerprint  # noqa: B018 - it takes the facts of the files
    edit_at(corpus, 150, lambda: (time.sleep(0.02), change(files / "a.jsonl")))
    if change is edit_and_restore_its_time:
        with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
            pack(corpus, ByteTokenizer(), 8, tmp_path)
        return
    pack(corpus, ByteTokenizer(), 8, tmp_path)
    assert np.array_equal(np.load(token_file(tmp_path)), ids_of(TEXTS))


def test_an_edit_that_keeps_the_times_of_a_new_file_is_seen_too(tmp_path, frequent_journals, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    content = (tmp_path / "a.jsonl").read_text()
    monkeypatch.setattr(local_files, "file_facts", lambda _: [0, 0, time.time_ns(), 0])
    corpus = LocalCorpus(tmp_path / "a.jsonl")
    monkeypatch.setattr(corpus, "check_unchanged", lambda: None)  # the times are as before
    edit_at(corpus, 1, lambda: (tmp_path / "a.jsonl").write_text(content.replace("document", "DOCUMENT")))
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        pack(corpus, ByteTokenizer(), 8, tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_no_journal_is_written_of_an_edited_file(tmp_path, frequent_journals, monkeypatch, files):
    """Otherwise a kill before the end of the file would leave what a later build continues."""
    corpus, content = LocalCorpus(files), (files / "a.jsonl").read_text()
    edit_at(corpus, 100, lambda: (files / "a.jsonl").write_text(content.replace("document", "DOCUMENT")))
    written, write = [], build.Journal.write

    def note(journal, draft):
        written.append(journal.documents)
        write(journal, draft)

    monkeypatch.setattr(build.Journal, "write", note)
    with pytest.raises(UserError, match="changed while it was read"):
        pack(corpus, ByteTokenizer(), 8, tmp_path)
    assert written == [16, 32, 48, 64, 80, 96]


def test_a_file_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    corpus = LocalCorpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    for read in (lambda: corpus.fingerprint, lambda: corpus.share_read):
        with pytest.raises(UserError, match=r"a\.txt cannot be read \(No such file or directory\)"):
            read()


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
    assert built_files.facts_of(token_file(tmp_path)) == {
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
    import os, sys, time
    from pathlib import Path
    from megalowbit.data.packing import pack
    from megalowbit.data.text_files.local_files import LocalCorpus
    from megalowbit.data.token_files import build
    from megalowbit.data.tokenize import ByteTokenizer

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            time.sleep(0.002)
            return super().encode_batch(texts)

    class Counting(Slow):
        def encode_batch(self, texts):
            print(len(texts))
            return super().encode_batch(texts)

    class SlowlyRead(LocalCorpus):  # other processes cannot import Slow
        def documents(self):
            for text in super().documents():
                time.sleep(0.003)
                yield text

    corpus, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    build.BATCH_DOCUMENTS, build.SECONDS_BETWEEN_JOURNALS = 4, 0.2 if count > 1 else 0.01
    tokenizer = {0: Counting, 1: Slow}.get(count, ByteTokenizer)()
    kind = SlowlyRead if count > 1 else LocalCorpus
    pack(kind(corpus), tokenizer, 8, folder, workers=count or 1)
    sys.stdout.flush()
    os._exit(0)  # an ordinary end takes longer than the build, and kills are for the build
"""


class Kills:
    """Builds that are killed.

    Args:
        folder: of the corpus, the program and the caches.
        count: number of processes that tokenise.
    """

    def __init__(self, folder, count):
        texts = [f"document {number} " * (number % 13 + 1) for number in range(1200)]
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
        self.folder, self.count, self.expected = folder, count, ids_of(texts)
        self.place = 0
        fork_server()  # its start takes longer than a build
        start = time.monotonic()
        self.build_whole()
        self.seconds = time.monotonic() - start

    @property
    def tokens(self):
        return self.folder / f"cache-{self.place}" / "tokens"

    def start(self):
        arguments = (self.folder / "a.jsonl", self.tokens.parent, self.count)
        return Forked(self.folder / "program.py", *arguments, output=self.folder / "output")

    def build_whole(self):
        """Complete the cache and begin a new one."""
        assert self.start().wait() == 0, (self.folder / "output").read_text()
        assert self.state() == (True, 0)
        (path,) = self.tokens.glob("*.npy")
        assert {each.name for each in self.tokens.iterdir()} == {path.name, f"{path.name}.manifest.json"}
        self.place += 1

    def state(self):
        """Whether there is a file, which is then the whole one, and the documents in the journal."""
        files = list(self.tokens.glob("*.npy"))
        for path in files:
            assert np.array_equal(np.load(path), self.expected)
            assert built_files._is_whole(path)
        journals = self.tokens.glob(".*.partial.json")
        return bool(files), max([json.loads(path.read_text())["documents"] for path in journals], default=0)

    def noted(self):
        """The documents in the journal of a build that may be running."""
        try:
            (journal,) = self.tokens.glob(".*.partial.json")
            return json.loads(journal.read_text())["documents"]
        except (ValueError, FileNotFoundError):  # none yet, or none any more
            return 0

    def kill_one(self, documents, seconds):
        """Kill a build some seconds after its journal has so many documents.

        Returns:
            Whether it was still running.
        """
        program = self.start()
        while program.poll() is None and self.noted() < documents:
            time.sleep(0.002)
        end = time.monotonic() + seconds
        while program.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        was_running = program.poll() is None
        program.kill()
        code = program.wait()
        assert was_running or code == 0, (self.folder / "output").read_text()
        return was_running

    def kill(self, num_kills):
        """Kill builds at random moments; returns how many continued an earlier one.

        Half of the kills of several processes, and all kills of one, are at moments of a build's usual time.
        The start of several processes takes most of that time and depends on the load of the machine, so the
        other half come when the journal has more documents than at the last kill.
        """
        choose, kills, before, num_continued = random.Random(7), 0, 0, 0
        while kills < num_kills:
            if self.count > 1 and kills % 2 == 1:
                kills += self.kill_one(before + choose.randint(1, 150), choose.uniform(0.0, 0.3))
            else:
                kills += self.kill_one(0, choose.uniform(0.0, self.seconds))
            is_whole, done = self.state()
            assert is_whole or done >= before  # nothing that a journal has noted is lost
            num_continued += before > 0 and (is_whole or done > before)
            before = 0 if is_whole else done
            self.place += is_whole
        self.build_whole()
        return num_continued


def test_kills_leave_no_cache_or_a_whole_one(tmp_path):
    Kills(tmp_path, 1).kill(6)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "num_kills"), [(1, 100), (2, 8)])
def test_a_hundred_kills_leave_no_cache_or_a_whole_one(tmp_path, count, num_kills):
    assert Kills(tmp_path, count).kill(num_kills) > 0


def test_of_several_jobs_one_tokenises(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    outputs = [tmp_path / f"output-{number}" for number in range(3)]
    programs = [
        Forked(tmp_path / "program.py", tmp_path / "a.jsonl", tmp_path / "cache", 0, output=output)
        for output in outputs
    ]
    assert [program.wait() for program in programs] == [0, 0, 0]
    encoded = [sum(map(int, output.read_text().split())) for output in outputs]
    assert sorted(encoded) == [0, 0, len(TEXTS)]
    assert np.array_equal(np.load(token_file(tmp_path / "cache")), ids_of(TEXTS))


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
