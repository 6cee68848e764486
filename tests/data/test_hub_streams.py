"""Streamed data sets, from folders on disk: once through the tokenizer, into the cache like any corpus."""

import errno
import json
import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from forks import run_script
from hypothesis import given
from hypothesis import strategies as st
from quick_cases import every_value, slow_except

from megalowbit.data import hub
from megalowbit.data.hub import HubCorpus, splits_overlap
from megalowbit.data.loader import build_loader, count_samples
from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import open_corpus, open_validation_corpus, sources_of
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.data.validation import describe_validation
from megalowbit.errors import TransientError, UserError

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {number} ü" for number in range(5000)]
SHARDS = 3


def write_json(path, texts):
    path.with_suffix(".jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def write_parquet(path, texts):
    table = pyarrow.table({"number": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=100)


def write_text(path, texts):
    path.with_suffix(".txt").write_text("".join(f"{each}\n" for each in texts))


WRITERS = {"json": write_json, "parquet": write_parquet, "text": write_text}


def write(folder, texts=TEXTS, kind="json"):
    """A data set of several files; the library reads them in the order of their names."""
    folder.mkdir(exist_ok=True)
    size = -(-len(texts) // SHARDS)
    for number in range(SHARDS):
        WRITERS[kind](folder / f"train-{number}-of-{SHARDS}", texts[number * size : (number + 1) * size])
    WRITERS[kind](folder / "test", texts[:3])
    return str(folder)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The cache of the library, into which nothing must be copied."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    return tmp_path / "library"


@pytest.fixture
def as_names(monkeypatch):
    """Let the settings name a folder like a data set of the hub."""
    monkeypatch.setattr(LocalCorpus, "is_meant", lambda corpus: False)
    monkeypatch.setattr(HubCorpus, "is_meant", lambda corpus: True)


def expected(texts):
    return b"".join(text.encode() + b"\0" for text in texts)


@every_value(kind=WRITERS, workers=[1, 2])
def test_the_tokens_are_those_of_the_documents_in_their_order(tmp_path, library, kind, workers):
    corpus = HubCorpus(write(tmp_path / "set", kind=kind), stream="all")
    packed = pack(corpus, ByteTokenizer(), 8, tmp_path / "cache", workers=workers)
    assert bytes(packed.tokens.tolist()) == expected(TEXTS)
    assert not list(library.rglob("*.arrow"))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 1667, 4999, 5000, 9999])
def test_a_bound_takes_the_first_documents_and_reads_no_further(tmp_path, library, count):
    corpus = HubCorpus(write(tmp_path / "set", kind="parquet"), stream=count)
    (tmp_path / "set" / f"train-2-of-{SHARDS}.parquet").unlink()  # the last third
    if count > 2 * 1667:
        with pytest.raises(TransientError, match=r"cannot be read after row \d+ .*check the network"):
            list(corpus.documents())
    else:
        shares = [corpus.share_read for _ in corpus.documents()]
        assert shares == [pytest.approx((number + 1) / count) for number in range(count)]
        assert list(corpus.documents()) == TEXTS[:count]


def test_a_bound_counts_documents_and_not_rows(tmp_path, library):
    folder = write(tmp_path / "set", ["", None, "a", "", "b", None, "c"])
    corpus = HubCorpus(folder, stream=2, max_bad_records=1)
    assert list(corpus.documents()) == ["a", "b"]
    assert (corpus.bad_records.count, corpus.bad_records.empty) == (1, 2)


def test_an_edit_or_another_bound_or_split_is_other_text(tmp_path, library):
    folder = write(tmp_path / "set")
    first = HubCorpus(folder, stream="all").fingerprint
    assert HubCorpus(folder, stream="all").fingerprint == first
    others = [{"stream": 10}, {"stream": 11}, {"stream": "all", "split": "test"}, {"stream": None}]
    found = {HubCorpus(folder, **values).fingerprint for values in others}
    assert len(found | {first}) == 5
    write_json(tmp_path / "set" / f"train-1-of-{SHARDS}", ["edited"])
    assert HubCorpus(folder, stream="all").fingerprint != first


def test_the_order_of_samples_is_that_of_a_local_file(tmp_path, library, as_names, monkeypatch):
    """A stream goes into the cache first, so its samples are shuffled like all others, without a buffer."""
    more = {"sequence_length": 8, "seed": 3, "cache_dir": tmp_path / "cache"}
    settings = DataSettings(corpus=write(tmp_path / "set"), stream="all", **more)
    streamed = build_loader(settings, micro_batch_size=4, rank=0, world_size=1)
    write_json(tmp_path / "local", TEXTS)
    monkeypatch.undo()
    local = DataSettings(corpus=str(tmp_path / "local.jsonl"), **more)
    loader = build_loader(local, micro_batch_size=4, rank=0, world_size=1)
    rows = []
    for _ in range(50):
        batch, other = next(streamed)["input_ids"], next(loader)["input_ids"]
        assert batch.equal(other)
        rows += batch.tolist()
    flat = np.frombuffer(expected(TEXTS), np.uint8)
    in_order = flat[: len(flat) // 8 * 8].reshape(-1, 8).tolist()
    assert rows != in_order[: len(rows)]
    assert {tuple(row) for row in rows} <= {tuple(row) for row in in_order}


KILLED = """
    import itertools, os, signal, sys
    from pathlib import Path
    from megalowbit.data.hub import HubCorpus
    from megalowbit.data.packing import pack
    from megalowbit.data.token_files import build
    from megalowbit.data.tokenize import ByteTokenizer

    build.SECONDS_BETWEEN_JOURNALS = 0

    class Killed(HubCorpus):
        def documents(self):
            yield from itertools.islice(super().documents(), int(sys.argv[3]))
            os.kill(os.getpid(), signal.SIGKILL)

    pack(Killed(sys.argv[1], stream="all"), ByteTokenizer(), 8, Path(sys.argv[2]))
"""


@pytest.mark.parametrize("after", slow_except([700], [0, 700, 4999]))
def test_a_killed_build_leaves_no_cache_and_the_next_one_continues(tmp_path, library, after, caplog):
    folder, cache = write(tmp_path / "set"), tmp_path / "cache"
    (tmp_path / "program.py").write_text("if True:" + KILLED)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run_script(tmp_path / "program.py", folder, cache, after, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(cache.rglob("[!.]*.npy"))
    with caplog.at_level(logging.INFO):
        packed = pack(HubCorpus(folder, stream="all"), ByteTokenizer(), 8, cache)
    assert bytes(packed.tokens.tolist()) == expected(TEXTS)
    assert ("continuing after" in caplog.text) == (after > 512)
    assert len(list(cache.rglob("*.npy"))) == 1
    assert not list(cache.rglob(".*"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split": "validation"}, r"cannot be loaded \(Bad split: validation\. Available splits: .*'train'"),
        ({"split": "train[:10]"}, r"cannot be loaded \(Bad split: train\[:10\]"),
        ({"text_field": "texts"}, "unknown text_field 'texts': did you mean 'text'"),
        ({"text_field": "number"}, "column 'number' is int64, not text: set text_field"),
        ({"config": "large"}, "BuilderConfig 'large' not found"),
    ],
)
def test_a_missing_part_is_a_one_line_error(tmp_path, library, values, message):
    folder = write(tmp_path / "set", kind="parquet")
    with pytest.raises(UserError, match=message) as caught:
        HubCorpus(folder, stream="all", **values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["texts", "number"])
def test_a_column_that_is_known_only_from_reading_is_checked_then(tmp_path, library, monkeypatch, field):
    folder = write(tmp_path / "set", kind="parquet")
    monkeypatch.setattr(HubCorpus, "_check", lambda *_: None)  # as if the library told no columns
    with pytest.raises(UserError, match=r"unknown text_field 'texts'|column 'number' is int64, not text"):
        list(HubCorpus(folder, stream="all", text_field=field).documents())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"other": "c"}\n', "cannot be read after row 3072 .*Couldn't cast"),
        (b"not JSON\n", "cannot be read after row 3072 .*JSON parse error"),
    ],
)
def test_a_later_file_of_another_kind_is_a_one_line_error(tmp_path, library, content, message):
    folder = write(tmp_path / "set")
    (tmp_path / "set" / f"train-2-of-{SHARDS}.jsonl").write_bytes(content)
    corpus, read = HubCorpus(folder, stream="all"), []
    with pytest.raises(UserError, match=message) as caught:
        read += corpus.documents()
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, TransientError)


@pytest.mark.parametrize(
    ("stream", "remedy"), [("all", "fix the data set"), (None, "remove it from the cache")]
)
def test_only_what_is_wrong_with_the_data_set_is_blamed_on_it(tmp_path, library, monkeypatch, stream, remedy):
    corpus = HubCorpus(write(tmp_path / "set"), stream=stream)

    def raising(error):
        def rows(**_):
            raise error
            yield

        return lambda *_: SimpleNamespace(iter=rows)

    monkeypatch.setattr(type(corpus._rows), "with_format", raising(ValueError("odd")))
    with pytest.raises(UserError, match=rf"cannot be read after row 0 \(odd\): {remedy}"):
        list(corpus.documents())
    monkeypatch.setattr(type(corpus._rows), "with_format", raising(MemoryError("full")))
    with pytest.raises(MemoryError, match=r"^full$"):
        list(corpus.documents())


def test_without_a_network_only_text_that_is_in_the_cache_is_used(tmp_path, library, monkeypatch, caplog):
    folder, cache = write(tmp_path / "set"), tmp_path / "cache"
    before = pack(HubCorpus(folder, stream="all", cache_dir=cache), ByteTokenizer(), 8, cache)

    def refuse(*names):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    again = pack(HubCorpus(folder, stream="all", cache_dir=cache), ByteTokenizer(), 8, cache)
    assert again.fingerprint == before.fingerprint
    assert f"data set {folder}/train cannot be reached (no route)" in caplog.text
    bounded = HubCorpus(folder, stream=10, cache_dir=cache)  # was never read
    with pytest.raises(UserError, match=r"cannot be reached, and its tokens are not in .*check the network"):
        pack(bounded, ByteTokenizer(), 8, cache)
    for unknown in ({"cache_dir": tmp_path / "empty"}, {}):
        with pytest.raises(UserError, match=r"cannot be loaded \(no route\): check .* the network"):
            HubCorpus(folder, stream="all", **unknown)


def test_a_downloaded_copy_is_no_stream(tmp_path, library, monkeypatch, caplog):
    """Without a network, the library offers such a copy, of which it does not know the files."""
    folder, cache = write(tmp_path / "set"), tmp_path / "cache"
    build = datasets.load_dataset_builder

    def of_a_copy(*names):
        builder = build(*names)
        builder.config.data_files = None
        return builder

    first = HubCorpus(folder, stream="all", cache_dir=cache).fingerprint
    monkeypatch.setattr(datasets, "load_dataset_builder", of_a_copy)
    assert HubCorpus(folder, stream="all", cache_dir=cache).fingerprint == first
    assert "cannot be reached (only a downloaded copy is at hand)" in caplog.text


def test_complete_tokens_are_used_from_a_cache_that_cannot_be_written(tmp_path, library, monkeypatch, caplog):
    folder, cache = write(tmp_path / "set"), tmp_path / "cache"
    before = pack(HubCorpus(folder, stream="all", cache_dir=cache), ByteTokenizer(), 8, cache)

    def refuse(*names):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(hub, "atomic_file", refuse)
    again = pack(HubCorpus(folder, stream="all", cache_dir=cache), ByteTokenizer(), 8, cache)
    assert again.fingerprint == before.fingerprint
    assert not caplog.text
    (note,) = cache.glob("data_sets/stream-*.json")
    for damage in (lambda: note.write_text("{"), note.unlink):  # tokens alone are enough
        damage()
        caplog.clear()
        again = pack(HubCorpus(folder, stream="all", cache_dir=cache), ByteTokenizer(), 8, cache)
        assert again.fingerprint == before.fingerprint
        assert "cannot be written (Read-only file system): without a network, data set" in caplog.text


def test_sources_and_text_for_validation_have_streams_of_their_own(tmp_path, library, as_names):
    folder, cache = write(tmp_path / "set"), tmp_path / "cache"
    more = {"sequence_length": 8, "cache_dir": cache}
    sources = {"a": {"corpus": folder, "weight": 1, "stream": 5}, "b": {"corpus": "x", "weight": 1}}
    found = sources_of(DataSettings(sources=sources, **more))
    assert [each.stream for each in found.values()] == [5, None]
    whole = {"corpus": folder, "stream": 40}
    held = open_validation_corpus(DataSettings(**whole, validation={"split": "test"}, **more))
    assert (held.stream, len(list(held.documents()))) == (None, 3)
    split = {"split": "test", "stream": "all"}
    held = open_validation_corpus(DataSettings(**whole, validation=split, **more))
    assert (held.stream, len(list(held.documents()))) == ("all", 3)
    shared = DataSettings(**whole, validation={"share": 0.3}, **more)
    parts = [list(opened(shared).documents()) for opened in (open_corpus, open_validation_corpus)]
    assert sorted(parts[0] + parts[1]) == sorted(TEXTS[:40])
    same = DataSettings(**whole, validation={"corpus": folder, "split": "train", "stream": 7}, **more)
    with pytest.raises(UserError, match="is the text for training"):
        open_validation_corpus(same)


OVERLAPS = [
    ("train", "train[:10%]"),
    ("train[:50%]", "train[40%:]"),
    ("train+test", "train"),
    ("test", "train[1:3]+test"),
    ("all", "test"),
    ("train[:14]", "train[-50%:]"),
    ("train[-2:]", "train[-10%:]"),
]
SEPARATE = [
    ("train", "test"),
    ("train[:90%]", "train[90%:]"),
    ("train[:13]", "train[-50%:]"),
    ("train[:25]", "train[25:]"),
    ("train[:-5]", "train[-5:]"),
    ("train[:30%]+train[60%:]", "train[30%:60%]"),
    ("test+train[5:]", "train[:5]"),
]


@pytest.mark.parametrize(
    ("trained", "held", "is_blend"),
    [
        pytest.param(*splits, is_blend, marks=() if place % 2 == is_blend else pytest.mark.slow)
        for place, splits in enumerate(OVERLAPS + SEPARATE)
        for is_blend in (False, True)
    ],
)
def test_splits_for_validation_have_no_rows_for_training(
    tmp_path, library, as_names, trained, held, is_blend
):
    folder = write(tmp_path / "set", [f"document {number}" for number in range(27)])
    write_json(Path(folder, "test"), ["others 1", "others 2"])
    source = {"corpus": folder, "split": trained}
    chosen = {"sources": {"a": {**source, "weight": 1}}} if is_blend else source
    settings = DataSettings(
        sequence_length=8, cache_dir=tmp_path / "c", validation={"corpus": folder, "split": held}, **chosen
    )
    rows, others = ({*HubCorpus(folder, split=split).documents()} for split in (trained, held))
    assert bool(rows & others) is ((trained, held) in OVERLAPS)
    if (trained, held) in SEPARATE:
        assert count_samples(settings) > 0
        return
    with pytest.raises(UserError, match=r"^(data\.validation: )?.* is the text for training"):
        count_samples(settings)


@pytest.mark.parametrize(
    ("trained", "held"),
    [
        ({"stream": "all"}, {"stream": 20}),
        ({"stream": "all"}, {}),
        ({"split": "train+test"}, {"stream": "all"}),
        ({}, {"corpus_config": "default", "stream": "all"}),
        ({"split": "train[:5]"}, {"stream": 20}),
    ],
)
def test_a_stream_and_a_copy_have_the_same_rows(tmp_path, library, as_names, trained, held):
    folder = write(tmp_path / "set", TEXTS[:40])
    more = {"sequence_length": 8, "cache_dir": tmp_path / "cache"}
    validation = {"corpus": folder, "split": "train", **held}
    for chosen in (
        {"corpus": folder, **trained},
        {"sources": {"a": {"corpus": folder, "weight": 1, **trained}}},
    ):
        with pytest.raises(UserError, match="is the text for training"):
            describe_validation(DataSettings(**chosen, validation=validation, **more))  # without opening it
        with pytest.raises(UserError, match="is the text for training"):
            count_samples(DataSettings(**chosen, validation=validation, **more))


@pytest.mark.parametrize(("start", "max_bad_records", "is_refused"), [(20, 0, 0), (19, 0, 1), (20, 3, 1)])
def test_the_first_documents_of_a_stream_are_its_first_rows(
    tmp_path, library, as_names, start, max_bad_records, is_refused
):
    folder, more = write(tmp_path / "set", TEXTS[:40]), {"max_bad_records": max_bad_records}
    held = {"corpus": folder, "split": "train", "stream": 20}
    chosen = DataSettings(
        corpus=folder,
        split=f"train[{start}:]",
        validation=held,
        sequence_length=8,
        cache_dir=tmp_path / "cache",
        **more,
    )
    with pytest.raises(UserError, match="is the text for training") if is_refused else nullcontext():
        assert count_samples(chosen) > 0


def test_a_configuration_that_the_library_has_chosen_is_known(tmp_path, library, as_names):
    folder = write(tmp_path / "set", TEXTS[:40])
    names = "train-*.jsonl", "test.jsonl"
    files = "".join(
        f"  - split: {split}\n    path: {name}\n"
        for split, name in zip(("train", "test"), names, strict=True)
    )
    card = f"---\nconfigs:\n- config_name: plain\n  data_files:\n{files}---\n"
    (tmp_path / "set" / "README.md").write_text(card)
    held = {"corpus": folder, "corpus_config": "plain", "split": "train[:5]"}
    more = {"sequence_length": 8, "cache_dir": tmp_path / "cache"}
    with pytest.raises(UserError, match=r"set/plain/train.* is the text for training"):
        count_samples(DataSettings(corpus=folder, validation=held, **more))


def test_a_stream_and_a_copy_are_the_same_source(tmp_path, library, as_names):
    folder, more = write(tmp_path / "set"), {"sequence_length": 8, "cache_dir": tmp_path / "cache"}
    sources = {
        name: {"corpus": folder, "weight": 1, "stream": each} for name, each in (("a", None), ("b", "all"))
    }
    with pytest.raises(UserError, match=r"data\.sources\.a and data\.sources\.b are the same text"):
        count_samples(DataSettings(sources=sources, **more))
    sources["b"]["stream"] = 5  # to give these rows more weight
    assert count_samples(DataSettings(sources=sources, **more)) > 0


@given(
    st.lists(st.integers(0, 130) | st.none(), min_size=4, max_size=4),
    st.sampled_from(["", "%"]),
    st.booleans(),
    st.integers(100, 300),
)
def test_what_is_said_of_splits_of_any_length_holds_for_each(bounds, unit, is_known, length):
    bounds = [each if unit == "" or each is None else min(each, 100) for each in bounds]
    start, end, other_start, other_end = ("" if each is None else f"{each}{unit}" for each in bounds)
    one, other = f"train[{start}:{end}]", f"train[{other_start}:{other_end}]"
    rows, others = ({*_range(each, length, unit)} for each in (bounds[:2], bounds[2:]))
    said = splits_overlap(one, other, {"train": length} if is_known else {})
    if is_known or said is False:
        assert said is bool(rows & others)


def _range(bounds, length, unit):
    """The rows of a slice; percentages are rounded to the closest row, halves to an even one."""
    places = [each if unit == "" or each is None else round(each * length / 100) for each in bounds]
    return range(length)[slice(*places)]


def test_slices_whose_order_depends_on_the_length_are_not_decided_without_it():
    for pair in (("train[:-5]", "train[-5:]"), ("train[:10]", "train[10%:]")):
        assert splits_overlap(*pair, {}) is None
        assert splits_overlap(*pair, {"train": 100}) is False
    assert splits_overlap("train[:10]", "train[10%:]", {"train": 50}) is True
    assert splits_overlap("train", "train[-5:]", {}) is True
    assert splits_overlap("train[:90%]", "train[90%:]", {}) is False
    with pytest.raises(UserError, match=r"split 'train\[a\]' or 'train' is not one of the library"):
        splits_overlap("train[a]", "train", {})


@pytest.mark.parametrize("stream", [0, -1, True, 1.5, "some"])
def test_a_stream_is_all_or_a_number_of_documents(stream):
    with pytest.raises(ValueError, match="stream") as caught:
        DataSettings(corpus="a/b", sequence_length=8, stream=stream)
    assert len(caught.value.errors()) == 1


def test_a_stream_of_other_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    settings = DataSettings(corpus=str(tmp_path / "a.txt"), sequence_length=8, stream=10)
    with pytest.raises(UserError, match=r"stream = 10 needs a Hugging Face data set, and corpus .* is none"):
        open_corpus(settings)
    with pytest.raises(ValueError, match="stream has no effect on sources"):
        DataSettings(sources={"a": {"corpus": "stdlib", "weight": 1}}, sequence_length=8, stream=10)
    with pytest.raises(ValueError, match=r"stream has no effect here: set data\.stream"):
        DataSettings(corpus="a/b", sequence_length=8, validation={"share": 0.1, "stream": 10})


def test_pieces_of_a_stream_do_not_depend_on_how_it_is_read(tmp_path, library, monkeypatch):
    folder = write(tmp_path / "set", kind="parquet")
    monkeypatch.setattr(hub, "ROWS_PER_READ", 7)
    assert list(HubCorpus(folder, stream=100).documents()) == TEXTS[:100]
    assert HubCorpus(folder).fingerprint != HubCorpus(folder, split="test").fingerprint
