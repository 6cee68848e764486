import glob
import gzip
import hashlib
import itertools
import json
import logging
import os
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unprivileged import said_without_privileges

from megalowbit.data.cache.digests import corpus_digests
from megalowbit.data.corpus import DocumentShare
from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import check_held_out, open_corpus
from megalowbit.data.text_files import lines
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def documents(path, **values):
    return list(LocalCorpus(path, **values).documents())


def test_a_text_file_is_one_unchanged_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffeins\r\n\r\n  zwei\tdrei ünd\n".encode())
    assert documents(path) == ["eins\r\n\r\n  zwei\tdrei ünd\n"]


def test_a_large_text_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LARGEST_DOCUMENT", 100)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    pieces = documents(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(len(piece) < 110 for piece in pieces)


@given(st.text(alphabet="ab é\n\t𝄞", max_size=200), st.booleans())
def test_long_lines_are_cut_at_spaces_and_nothing_is_lost(tmp_path_factory, text, has_mark):
    path = tmp_path_factory.mktemp("long") / "a.txt"
    text = "x" + text
    path.write_bytes((lines.BYTE_ORDER_MARK if has_mark else b"") + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "LARGEST_DOCUMENT", 20)
        patch.setattr(lines, "READ_SIZE", 6)
        found = documents(path)
        cut = list(lines.cut(text))
    assert "".join(found) == "".join(cut) == text
    assert all(len(piece) <= 20 for piece in cut)
    for before, after in itertools.pairwise(cut):  # at a space, unless there is none
        assert after[0] in " \t\n" or not set(before[14 - 20 :]) & set(" \t\n")
    if max(map(len, text.splitlines())) < 20:  # as files without long lines always were
        rows, expected = text.splitlines(keepends=True), [""]
        for line in rows:
            expected[-1] += line
            if len(expected[-1]) >= 20:
                expected.append("")
        assert found == [document for document in expected if document]


@pytest.mark.parametrize(
    ("content", "line"), [(b"ab\ncd\xc3", 2), (b"ab\n" + b"c" * 99 + b"\xff" + b"d" * 99, 2)]
)
def test_a_byte_that_is_wrong_is_found_in_long_lines_too(tmp_path, monkeypatch, content, line):
    monkeypatch.setattr(lines, "READ_SIZE", 8)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt, line {line}: byte 0x(c3|ff) is not UTF-8"):
        documents(tmp_path / "a.txt")


@pytest.mark.parametrize("text", ["word " * 2**22, "x" * 2**24, "é " * 2**23])
def test_tokenising_a_long_line_takes_constant_memory(tmp_path, monkeypatch, text):
    monkeypatch.setattr(lines, "LARGEST_DOCUMENT", 2**18)
    monkeypatch.setattr(lines, "READ_SIZE", 2**16)
    path, size = tmp_path / "a.txt", len(text.encode())
    path.write_text(text, encoding="utf-8")
    del text
    corpus, tokenizer = LocalCorpus(path), ByteTokenizer()
    tracemalloc.start()
    try:
        packed = pack(corpus, tokenizer, 128, tmp_path / "cache")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert packed.num_tokens >= size
    assert peak < size / 2  # it was 7 times the size; the batch of a MiB characters decides


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
@example(["\ufeff", "\0", "\r\n", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "\ufffe\uffff\U0010ffff"])
def test_jsonl_and_parquet_give_back_any_text(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("files")
    write_jsonl(folder / "a.jsonl", [{"text": text, "other": 1} for text in texts])
    write_parquet(folder / "a.parquet", text=texts, other=list(range(len(texts))))
    assert documents(folder / "a.jsonl") == texts
    assert documents(folder / "a.parquet") == texts


def test_blank_lines_and_empty_texts_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n  \n{"text": "one"}\n')
    write_parquet(tmp_path / "a.parquet", text=["", "two"])
    assert documents(tmp_path) == ["one", "two"]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c.txt", ".hidden.txt", ".git/x.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a/c.txt", "a/z.txt", "b.txt"]


def test_another_field_may_hold_the_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"body": "one"}])
    write_parquet(tmp_path / "b.parquet", body=["two"])
    assert documents(tmp_path, text_field="body") == ["one", "two"]


def test_the_fingerprint_of_a_file_depends_on_how_it_is_read(tmp_path):
    content = gzip.compress(b'{"text": "hello"}\n')
    paths = [tmp_path / name for name in ("a.txt.gz", "a.jsonl.gz", "b.jsonl.gz")]
    for path in paths:
        path.write_bytes(content)
    as_text, as_lines, elsewhere = (LocalCorpus(path).fingerprint for path in paths)
    assert as_text != as_lines == elsewhere


def test_the_fingerprint_follows_the_content_not_the_place_or_the_time(tmp_path):
    def fingerprint(folder, text):
        folder.mkdir(exist_ok=True)
        (folder / "a.txt").write_text(text)
        return LocalCorpus(folder).fingerprint

    assert fingerprint(tmp_path / "one", "text") == fingerprint(tmp_path / "two", "text")
    assert fingerprint(tmp_path / "one", "text") != fingerprint(tmp_path / "two", "tex!")
    assert LocalCorpus(tmp_path / "one").fingerprint != LocalCorpus(tmp_path, text_field="body").fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b"\n\n", r"a\.jsonl contains no text"),
        ("a.csv", b"x", r"a\.csv has an unknown suffix: rename it"),
        ("a.txt", b"fine\nbad \xff byte\n", r"a\.txt, line 2: byte 0xff is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl is not JSON: line 2, column 13"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', r"a\.jsonl, line 3: a list, not an object"),
        (
            "a.jsonl",
            b'{"texts": "a"}\n',
            r"a\.jsonl, line 1: unknown text_field 'text': did you mean 'texts'\?",
        ),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, r"a\.jsonl, line 2 is nested too deeply"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl holds an integer of thousands of digits"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"a\.jsonl, line 2: 'text' is null, not text"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: 'text' is a int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: lone surrogate"),
        ("a.parquet", b"PAR1 no parquet", r"a\.parquet is not a readable parquet file"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_parquet_column_that_is_missing_or_not_text_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=[1, 2])
    with pytest.raises(UserError, match="column 'text' is int64, not text"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="unknown text_field 'body'"):
        documents(tmp_path / "a.parquet", text_field="body")


def test_a_null_in_a_parquet_column_is_named_with_its_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=[*["one"] * 1500, None, "two"])
    with pytest.raises(UserError, match=r"a\.parquet, row 1501: 'text' is null, not text: remove it"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(["one", "two"], type=pyarrow.large_string()),
        pyarrow.array(["one", "two"], type=pyarrow.string_view()),
        pyarrow.array(["one", "two"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type).partition("<")[0],
)
def test_every_type_of_text_column_is_read(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", text=column)
    assert documents(tmp_path / "a.parquet") == ["one", "two"]


def damage_the_pages(path):
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196  # the footer, which is read first, stays whole
    path.write_bytes(content)


def test_damage_inside_a_parquet_file_is_reported_for_that_file_and_not_the_cache(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, text=[f"document {number}" for number in range(3000)])
    damage_the_pages(path)
    corpus = LocalCorpus(path)
    with pytest.raises(UserError, match=r"a\.parquet is not a readable parquet file") as caught:
        pack(corpus, ByteTokenizer(), 8, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_parquet_column_that_is_not_utf8_is_named(tmp_path):
    column = pyarrow.array([b"\xff"]).view(pyarrow.string())
    write_parquet(tmp_path / "a.parquet", text=column)
    with pytest.raises(UserError, match=r"a\.parquet, row 1: 'text' is not UTF-8"):
        documents(tmp_path / "a.parquet")


def test_a_file_deleted_before_it_is_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    corpus = LocalCorpus(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"corpus file .*a\.txt cannot be read \(No such file"):
        list(corpus.documents())


def test_suffixes_in_upper_case_are_read_and_lower_case_keeps_its_fingerprint(tmp_path):
    row = json.dumps({"text": "row"}) + "\n"
    for name, content in {
        "a.TXT": b"text",
        "b.JSONL": row.encode(),
        "c.Txt.GZ": gzip.compress(b"packed"),
        "d.JSON.gz": gzip.compress(row.encode()),
        "e.txt.ZST": pyarrow.compress(b"zst", "zstd", asbytes=True),
    }.items():
        (tmp_path / name).write_bytes(content)
    write_parquet(tmp_path / "f.PARQUET", text=["column"])
    assert documents(tmp_path) == ["text", "row", "packed", "row", "zst", "column"]
    assert documents(tmp_path / "c.Txt.GZ") == ["packed"]
    (tmp_path / "c.Txt.GZ").rename(tmp_path / "c.txt.gz")
    expected = hashlib.sha256(b"files 'text'")
    (content,) = corpus_digests((tmp_path / "c.txt.gz",), None)
    expected.update(f".txt.gz\0{content}\0".encode())
    assert LocalCorpus(tmp_path / "c.txt.gz").fingerprint == expected.hexdigest()


@pytest.mark.parametrize("is_glob", [False, True])
def test_a_folder_says_how_many_files_of_other_kinds_it_leaves_out(tmp_path, caplog, is_glob):
    caplog.set_level(logging.INFO)
    for name in ("a.txt", "z.md", "sub/b.py", "sub/c.json", ".hidden.md", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    for _ in range(2):  # a run opens it more than once
        assert documents(tmp_path / "**" if is_glob else tmp_path) == ["text"]
    line = f"corpus folder {tmp_path}: 3 files of other kinds are not read, such as sub/b.py"
    assert caplog.messages == ([] if is_glob else [line])


@pytest.mark.parametrize("pattern", ["", "*.*"])
def test_files_without_text_are_left_out_of_folders_and_globs(tmp_path, caplog, pattern):
    caplog.set_level(logging.INFO)
    (tmp_path / "m.txt").write_text("text")
    fingerprint = LocalCorpus(tmp_path / pattern).fingerprint
    for name in ("a.txt", "z.jsonl", "z.parquet"):
        (tmp_path / name).touch()
    assert LocalCorpus(tmp_path / pattern).fingerprint == fingerprint  # the same documents
    for name, content in (("b.jsonl", b"\n\n"), ("c.txt.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(content)
    corpus = LocalCorpus(tmp_path / pattern)
    for _ in range(2):
        assert list(corpus.documents()) == ["text"]
    assert corpus.share_read == 1
    assert caplog.messages == [
        f"corpus {tmp_path / pattern}: empty files are left out (3, such as {tmp_path}/a.txt)",
        f"corpus {tmp_path / pattern}: files without text are left out (2, such as {tmp_path}/b.jsonl)",
    ]


def test_a_corpus_of_files_without_text_only_is_one_error(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).touch()
    line = rf"corpus {tmp_path} has only empty files \(2, such as {tmp_path}/a\.txt\): name another"
    with pytest.raises(UserError, match=line):
        LocalCorpus(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"has only files without text \(1, such as .*c\.jsonl\)"):
        documents(tmp_path)


def test_an_empty_file_for_training_and_for_validation_is_not_the_same_text(tmp_path):
    for folder in ("train", "held"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "empty.txt").touch()
        (tmp_path / folder / "a.txt").write_text(folder)
    train, held = (LocalCorpus(tmp_path / folder) for folder in ("train", "held"))
    check_held_out(held, [train], None)
    assert [file.name for file in held.files] == ["a.txt"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.py"],
            "files, but 1 .py file: copy them as .txt if they are text, or write JSON lines (.jsonl) ",
        ),
        (["a.py", "b/c.py"], "files, but 2 .py files: copy"),
        (["a.py", "b.md", "c.md"], "files, but 3 .md, .py files: copy"),
        (["a.py", "b.md", "c.rst"], "files, but 3 .md, .py and other files: copy"),
        (["a.py", "LICENSE"], "files, but 2 .py and other files: copy"),
        (["README", "LICENSE"], "files, but 2 files without a suffix, such as LICENSE: copy"),
        ([".hidden"], "files: name another"),
    ],
)
def test_a_folder_without_text_files_is_refused_with_what_it_has(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=r"has no \.txt, \.jsonl, \.parquet, \.arrow files") as caught:
        LocalCorpus(tmp_path, text_field="body")
    assert message in str(caught.value)
    assert str(caught.value).endswith("a field 'body'" if "copy" in message else "name another")


def test_of_a_saved_data_set_only_its_own_files_are_read(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megalowbit")
    datasets.disable_progress_bars()
    folder = tmp_path / "data" / "set"
    for name, rows, shards in (("old", 4, 2), ("new", 3, 1)):  # the second leaves a shard of the first
        saved = datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(rows)]})
        saved.save_to_disk(folder, num_shards=shards)
    loaded = datasets.load_from_disk(folder)
    loaded.map(lambda row: {"text": row["text"].upper()})
    loaded.filter(lambda row: row["text"] != "new 0")
    assert len(list(folder.glob("*.arrow"))) == 5
    (tmp_path / "data" / "a.txt").write_text("beside it")
    expected = list(loaded["text"])
    assert documents(folder) == documents(folder / "*.arrow") == expected
    assert documents(tmp_path / "data") == documents(tmp_path / "data" / "**") == ["beside it", *expected]
    line = f"corpus {folder}: .arrow files that the state.json beside them does not name are left out (4, "
    assert caplog.text.count(line) == 1
    assert len(LocalCorpus(folder / "cache-*.arrow").files) == 2  # which names them
    with pytest.raises(UserError, match=r"only files that are left out, .* state\.json beside .*of-00002"):
        documents(folder / "data-*-of-00002.arrow")
    (folder / "extra.jsonl").write_text('{"text": "by hand"}\n')
    assert documents(folder / "*.jsonl") == ["by hand"]
    assert documents(folder) == [*expected, "by hand"]
    only = next(folder.glob("data-00000-of-00001.arrow"))
    only.rename(tmp_path / "elsewhere.arrow")
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow is missing, and .*state\.json names it"):
        documents(folder)


@pytest.mark.parametrize("state", [None, "{", "[]", "{}", '{"_data_files": [1]}'])
def test_caches_of_the_datasets_library_are_not_read_elsewhere(tmp_path, state, caplog):
    rows = pyarrow.table({"text": ["one", "two"]})
    for name in ("cache-0123abcd.arrow", "data.arrow"):
        with pyarrow.ipc.new_stream(tmp_path / name, rows.schema) as stream:
            stream.write_table(rows)
    if state is not None:
        (tmp_path / "state.json").write_text(state)  # of another program
    assert documents(tmp_path) == ["one", "two"]
    assert "caches of the datasets library are left out (1, such as " in caplog.text
    assert caplog.records[0].levelname == "WARNING"
    assert documents(tmp_path / "cache-0123abcd.arrow") == ["one", "two"]
    with pytest.raises(UserError, match="has only files that are left out, caches of the datasets library"):
        documents(tmp_path / "*abcd.arrow")


def test_an_unreadable_folder_is_rejected_and_not_skipped(tmp_path):
    """As somebody who is not root, whom no permission stops."""
    (tmp_path / "secret").mkdir()
    for path in (tmp_path / "a.txt", tmp_path / "secret" / "b.txt"):
        path.write_text("text")
    (tmp_path / "secret").chmod(0)
    message = said_without_privileges(tmp_path, lambda: LocalCorpus(tmp_path))
    assert message == f"corpus folder {tmp_path}/secret cannot be read (Permission denied): fix or remove it"
    (tmp_path / "secret").chmod(0o755)
    assert len(LocalCorpus(tmp_path).files) == 2


@pytest.mark.parametrize("kind", ["FIFO", "device", "link to nothing", "folder"])
def test_only_regular_files_are_read_as_text(tmp_path, kind):
    path = tmp_path / "b.txt"
    (tmp_path / "a.txt").write_text("text")
    {
        "FIFO": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "link to nothing": lambda: path.symlink_to(tmp_path / "gone"),
        "folder": path.mkdir,
    }[kind]()
    if kind == "folder":
        assert [file.name for file in LocalCorpus(tmp_path).files] == ["a.txt"]
        return
    with pytest.raises(UserError, match=r"b\.txt is not a regular file, or is a dangling link: remove it"):
        LocalCorpus(tmp_path)
    if kind != "link to nothing":
        with pytest.raises(UserError, match="is a FIFO, a socket or a device: name a file or a folder"):
            LocalCorpus(path)


def test_a_glob_names_files_in_any_folders(tmp_path, monkeypatch):
    for name in ("a/1.txt", "a/2.txt", "b/c/1.txt", "a/1.md", "a/.1.txt", "1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "folder.txt").mkdir()
    assert documents(tmp_path / "a" / "*.txt") == ["a/1.txt", "a/2.txt"]
    assert documents(tmp_path / "**" / "1.*") == ["1.txt", "a/1.txt", "b/c/1.txt"]
    assert documents(tmp_path / "[ab]" / "[!1].txt") == ["a/2.txt"]
    monkeypatch.chdir(tmp_path)
    corpus = open_corpus(DataSettings(corpus="a/?.txt", sequence_length=8))
    assert list(corpus.documents()) == ["a/1.txt", "a/2.txt"]
    with pytest.raises(UserError, match=r"corpus glob .*\*\.jsonl matches no \.txt, .*\.arrow files"):
        documents(tmp_path / "*.jsonl")


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "**/*.txt",
            "*/**/1.txt",
            "a/**/*.txt",
            "a/**",
            "**",
            "a/**/b/**/*.txt",
            "**/**/2.*",
            "**/[ab]/*.txt",
        ),
        *("**/.h/*.txt", "a**/*.txt", "*.txt/**/*.txt"),
    ],
)
def test_a_glob_without_links_matches_what_the_standard_library_matches(tmp_path, monkeypatch, pattern):
    for name in ("1", "a/1", "a/2", "a/b/1", "a/b/c/2", "b/a/b/2", "[ab]/1", "a/.h/1", ".h/2", "c.txt/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name)
    monkeypatch.chdir(tmp_path)
    matches = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 - another way than the corpus's
    expected = sorted({file.resolve() for file in matches if file.is_file()})
    for place in ("", f"{tmp_path}/"):
        assert sorted(file.resolve() for file in LocalCorpus(Path(place + pattern)).files) == expected


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**", "sub/**/*.txt", "*/**/*.txt"])
def test_links_to_folders_are_not_followed_into_loops(tmp_path, caplog, pattern):
    (tmp_path / "x" / "sub").mkdir(parents=True)
    (tmp_path / "x" / "sub" / "a.txt").write_text("text")
    for name in ("one", "two"):
        (tmp_path / "x" / "sub" / name).symlink_to("..")
    assert documents(tmp_path / "x" / pattern) == ["text"]
    assert "sub/one is a link and not followed: name it, if it is meant" in caplog.text


def test_a_glob_follows_the_links_that_it_names(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").write_text("text")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "near").symlink_to(tmp_path / "far")
    for pattern in ("near/*.txt", "*/a.txt", "near/**", "near"):
        assert documents(tmp_path / "x" / pattern) == ["text"]
    with pytest.raises(UserError, match=r"has no \.txt"):
        documents(tmp_path / "x")


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*.txt"])
def test_a_file_with_several_names_is_read_once(tmp_path, caplog, link, pattern):
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text("equal")  # equal content is no equal file
    for name in ("a.txt", "d.txt"):
        getattr(tmp_path / name, link)(tmp_path / "b.txt")
    corpus = LocalCorpus(tmp_path / pattern)
    assert [file.name for file in corpus.files] == ["a.txt", "c.txt"]
    assert list(corpus.documents()) == ["equal"] * 2
    (line,) = caplog.messages
    assert f"2 further names are passed over, such as {tmp_path}/b.txt for {tmp_path}/a.txt" in line


def test_files_that_share_an_inode_number_are_all_read(tmp_path, monkeypatch):
    """As some network file systems give them."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.txt").symlink_to("b.txt")
    stat = Path.stat

    def collide(path, **options):
        mode, _, *others = stat(path, **options)
        return os.stat_result((mode, 7, *others))

    monkeypatch.setattr(Path, "stat", collide)
    assert [file.name for file in LocalCorpus(tmp_path).files] == ["a.txt", "b.txt"]


def test_the_fingerprint_of_a_glob_follows_names_and_content_but_not_the_place(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "a").mkdir(parents=True)
        for name in ("x", "y"):
            (tmp_path / place / "a" / f"{name}.txt").write_text(name)
    one, two = (LocalCorpus(tmp_path / place / "*" / "?.txt").fingerprint for place in ("one", "two"))
    assert one == two
    assert LocalCorpus(tmp_path / "one" / "*" / "x.txt").fingerprint != one


def test_a_file_whose_name_is_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("itself")
    (tmp_path / "a1.txt").write_text("another")
    assert documents(tmp_path / "a[1].txt") == ["itself"]


def test_the_place_of_each_document_is_its_file_and_line_or_row(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LARGEST_DOCUMENT", 10)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("first line\nsecond\nthird\nfourth\n")
    write_parquet(tmp_path / "c.parquet", text=["row one", None, "row three"])
    corpus = LocalCorpus(tmp_path, max_bad_records=1)
    found = [(text, corpus.place.removeprefix(f"corpus file {tmp_path}/")) for text in corpus.documents()]
    assert found == [
        ("one", "a.jsonl, line 1"),
        ("two", "a.jsonl, line 4"),
        ("first line\n", "b.txt, line 1"),
        ("second\nthird\n", "b.txt, line 2"),
        ("fourth\n", "b.txt, line 4"),
        ("row one", "c.parquet, row 1"),
        ("row three", "c.parquet, row 3"),
    ]
    share = DocumentShare(corpus, 0.999, is_held_out=True)
    assert "c.parquet, row 3" in [share.place for _ in share.documents()][-1]
