import json
import sysconfig
from pathlib import Path

import pytest

from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import is_on_hub, open_corpus
from megalowbit.data.text_files.stdlib import StdlibCorpus
from megalowbit.errors import UserError


def settings(corpus, **values):
    return DataSettings(corpus=str(corpus), sequence_length=8, **values)


def test_the_standard_library_is_megabytes_of_its_own_sources():
    documents = list(StdlibCorpus().documents())
    assert 8e6 < sum(map(len, documents)) < 30e6
    own = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes().decode()
    assert own in documents


def test_the_standard_library_has_no_tests_and_no_packages_in_it():
    corpus = StdlibCorpus()
    parts = {part for path in corpus.paths for part in path.relative_to(corpus.root).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert "json" in parts


def make_library(root):
    for name, text in {"b.py": "two", "a.py": "one", "json/__init__.py": "three", "empty.py": ""}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "test").mkdir()
    (root / "test" / "test_a.py").write_text("left out")
    return root


def test_documents_come_in_the_order_of_their_paths_without_empty_ones(tmp_path):
    assert list(StdlibCorpus(make_library(tmp_path)).documents()) == ["one", "two", "three"]


def test_invalid_bytes_become_replacement_characters(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"caf\xe9 x")
    assert list(StdlibCorpus(tmp_path).documents()) == ["caf\ufffd x"]


def test_the_fingerprint_follows_content_and_names_but_not_the_place(tmp_path):
    first, copy = (StdlibCorpus(make_library(tmp_path / name)) for name in ("first", "copy"))
    assert first.fingerprint == copy.fingerprint
    (tmp_path / "copy" / "a.py").write_text("ONE")
    changed = StdlibCorpus(tmp_path / "copy").fingerprint
    (tmp_path / "copy" / "a.py").write_text("one")
    (tmp_path / "copy" / "a.py").rename(tmp_path / "copy" / "aa.py")
    assert len({first.fingerprint, changed, StdlibCorpus(tmp_path / "copy").fingerprint}) == 3


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(UserError, match="no Python sources"):
        StdlibCorpus(tmp_path)


def test_a_corpus_name_is_stdlib_or_a_path_or_a_data_set_in_that_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/one.jsonl").write_text(json.dumps({"body": "text"}))
    assert open_corpus(settings("stdlib")).name == "stdlib"
    assert list(open_corpus(settings("books", text_field="body")).documents()) == ["text"]
    assert open_corpus(settings(tmp_path / "books" / "one.jsonl")).name == str(
        tmp_path / "books" / "one.jsonl"
    )


@pytest.mark.parametrize(
    "name", ["nowhere.txt", "a/b.jsonl", "/no/such/folder", "./books", "~/nothing-here", "a/b/c"]
)
def test_a_path_that_does_not_exist_is_refused_before_any_download(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not exist: name a"):
        open_corpus(settings(name))


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [("stdlib", False), ("text.txt", False), ("wikitext", True), ("someone/some-text", True)],
)
def test_the_download_size_is_known_without_opening_the_data_set(corpus, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("x")
    assert is_on_hub(DataSettings(corpus=corpus, sequence_length=8)) is expected
