"""Which tokens a text's sequences predict, whose text counts, and what is refused."""

import hashlib
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launchers import training_text
from megalowbit.data import packing
from megalowbit.data.cache import digests
from megalowbit.data.loader import build_loader, count_samples
from megalowbit.data.packing import DocumentRules
from megalowbit.data.settings import DataSettings, ValidationSource
from megalowbit.data.sources import open_corpus, open_validation_corpus
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files import megatron
from megalowbit.data.token_files.megatron import MegatronWriter
from megalowbit.data.tokenize import (
    BPETokenizer,
    ByteTokenizer,
    FolderTokenizer,
    NoTokenizer,
    build_tokenizer,
)
from megalowbit.data.validation import TextLoss, ValidationText, describe_validation, open_validation
from megalowbit.errors import UserError
from megalowbit.labels import IGNORED_LABEL

BYTES = ByteTokenizer()
DOCUMENTS = [f"{line} äß漢" for line in training_text().splitlines()[:200]]


def numbered(count, length, limit=None):
    """Token i is i, so an id shows its place."""
    tokens = np.arange(count, dtype=np.uint32)
    return ValidationText(tokens, length, fingerprint="f", name="numbers", limit=limit)


@pytest.fixture
def documents(tmp_path):
    """A corpus of short documents."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    return path


def data(corpus, tmp_path, **more):
    cache = tmp_path / "cache"
    return DataSettings(corpus=str(corpus), sequence_length=32, cache_dir=cache, **more)


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 9), st.integers(0, 60), st.integers(1, 5), st.none() | st.integers(1, 40))
def test_each_token_after_the_first_is_predicted_once_by_the_one_before_it(length, more, size, limit):
    text = numbered(length + more, length, limit)
    seen = []
    for number in range(text.num_batches(size)):
        batch = text.batch(number, size)
        assert batch["input_ids"].shape == batch["labels"].shape == (size, length)
        counted = batch["labels"] != IGNORED_LABEL
        assert (batch["labels"] - batch["input_ids"])[counted].unique().tolist() == [1]
        seen += batch["labels"][counted].tolist()
        # a filled row repeats one of its batch
        rows = {tuple(row) for row in batch["input_ids"].tolist()}
        used = batch["input_ids"][counted.any(1)].tolist()
        assert rows == {tuple(row) for row in used}
        assert all(row == list(range(row[0], row[0] + length)) for row in batch["input_ids"].tolist())
    last = length + more - 1
    expected = last if limit is None else min(limit, last)
    assert len(seen) == len(set(seen)) == text.num_predicted == expected
    assert set(seen) <= set(range(1, last + 1))
    check_spread(sorted(seen), last, length)
    assert text.count_tokens() == expected
    assert text.count_bytes(BYTES) == expected  # no id is 0


def check_spread(places, last, length):
    """The predicted tokens are runs of a sequence each, with equal gaps, half as long at both ends."""
    count = math.ceil(len(places) / length)
    runs = [places[number * length : (number + 1) * length] for number in range(count)]
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    gaps = [later[0] - run[-1] - 1 for run, later in pairwise(runs)]
    even = (last - len(places)) / count
    assert all(abs(gap - even) < 1 for gap in gaps)
    assert all(abs(gap - even / 2) < 1 for gap in (runs[0][0] - 1, last - runs[-1][-1]))


def test_limited_tokens_are_of_documents_everywhere_and_no_others_are_read():
    documents, size, limit = 50, 200, 640
    ids = np.repeat(np.arange(1, documents + 1), size)
    text = ValidationText(
        ids, 32, fingerprint="f", name="", limit=limit, check=lambda ids, _: read.extend(ids)
    )
    read: list[int] = []
    batches = [text.batch(number, 4) for number in range(text.num_batches(4))]
    labels = torch.cat([each["labels"] for each in batches])
    found = labels[labels != IGNORED_LABEL]
    assert len(found) == limit
    assert len(found.unique()) == 20  # 20 sequences of 32 tokens, each of another document
    assert (found.min(), found.max()) == (2, 49)
    text.count_bytes(BYTES)
    assert len(read) == limit + 20  # and the one before each sequence


def test_counts_with_a_limit_are_those_of_the_batches():
    generator = np.random.default_rng(0)
    ids = np.where(generator.random(3000) < 0.1, 0, generator.integers(1, 256, 3000)).astype(np.uint8)
    rules = DocumentRules(end=0, are_separate=True, masks_first=True)
    text = ValidationText(ids, 16, fingerprint="f", name="", limit=250, rules=rules)
    batches = [text.batch(number, 3) for number in range(text.num_batches(3))]
    labels = torch.cat([each["labels"] for each in batches])
    assert text.count_tokens() == int((labels != IGNORED_LABEL).sum()) < 250
    assert text.count_bytes(BYTES) == int((labels > 0).sum())


def test_documents_are_apart_and_their_first_tokens_counted_or_not():
    ids = np.array([5, 2, 6, 7, 2, 2, 8, 9, 3, 4, 2, 1], dtype=np.uint8)  # 2 ends a document
    for masks_first in (False, True):
        rules = DocumentRules(end=2, are_separate=True, masks_first=masks_first)
        text = ValidationText(ids, 4, fingerprint="f", name="", rules=rules).limited(None)
        batches = [text.batch(number, 2) for number in range(text.num_batches(2))]
        rows, places, labels = (
            torch.cat([batch[name] for batch in batches]).tolist()
            for name in ("input_ids", "position_ids", "labels")
        )
        assert rows[:3] == [[5, 2, 6, 7], [2, 2, 8, 9], [9, 3, 4, 2]]
        assert places[:3] == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 3]]
        first = [IGNORED_LABEL] * 4 if masks_first else [6, 2, 8, 1]
        expected = [[2, first[0], 7, 2], [first[1], first[2], 9, 3], [IGNORED_LABEL, 4, 2, first[3]]]
        assert labels[:3] == expected
        counted = sum(label != IGNORED_LABEL for row in labels for label in row)
        assert text.count_tokens() == counted == (7 if masks_first else 11)
        counted = [row[place] for row in labels for place in range(4) if row[place] != IGNORED_LABEL]
        assert text.count_bytes(BYTES) == sum(each != 0 for each in counted)


def test_only_what_a_loss_depends_on_is_in_the_fingerprint():
    whole = numbered(50, 8)
    assert whole.limited(None).fingerprint == whole.limited(100).fingerprint == whole.fingerprint
    assert whole.limited(20).limited(None).fingerprint == whole.fingerprint
    assert len({each.fingerprint for each in (whole, whole.limited(20), numbered(50, 9))}) == 3
    # runs with a best checkpoint rely on it; with a limit it once was that of the first 20 tokens
    assert whole.fingerprint == hashlib.sha256(repr(("f", 8, 49)).encode()).hexdigest()[:32]
    assert whole.limited(20).fingerprint != hashlib.sha256(repr(("f", 8, 20)).encode()).hexdigest()[:32]


def test_a_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(UserError, match="numbers has 7 tokens, fewer than one sequence of 8: use more text"):
        numbered(7, 8)


def test_a_text_without_a_counted_token_is_refused():
    rules = DocumentRules(end=0, masks_first=True)
    values = {"fingerprint": "f", "name": "ends", "rules": rules}
    with pytest.raises(UserError, match="ends: all tokens to predict are first tokens of documents"):
        ValidationText(np.zeros(9, np.uint8), 4, **values)
    text = ValidationText(np.array([0, 0, 0, 0, 5, 0], np.uint8), 4, **values)
    assert text.count_tokens() == 1
    with pytest.raises(UserError, match=r"data\.eod_mask_loss"):
        text.limited(4)


def test_figures_of_a_text():
    loss = TextLoss(nats=200 * math.log(2), num_tokens=100, num_bytes=50)
    assert loss.loss == pytest.approx(2 * math.log(2))
    assert loss.perplexity == pytest.approx(4)
    assert loss.bits_per_byte == pytest.approx(4)
    assert TextLoss(nats=1e9, num_tokens=1, num_bytes=0).perplexity == math.inf
    assert TextLoss(nats=1.0, num_tokens=1, num_bytes=0).bits_per_byte is None


@pytest.mark.parametrize("kind", ["byte", "bpe", "folder"])
def test_bytes_are_those_of_the_documents(documents, tmp_path, kind):
    choice = {"tokenizer": "byte"} if kind == "byte" else {"tokenizer": "bpe", "vocab_size": 300}
    tokenizer = build_tokenizer(data(documents, tmp_path, **choice))
    if kind == "folder":
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        tokenizer = FolderTokenizer(tmp_path / "tokenizer")
    assert isinstance(
        tokenizer, {"byte": ByteTokenizer, "bpe": BPETokenizer, "folder": FolderTokenizer}[kind]
    )
    end = np.array([tokenizer.eos_token_id], dtype=tokenizer.dtype)
    pieces = [piece for ids in tokenizer.encode_batch(DOCUMENTS) for piece in (ids, end)]
    tokens = np.concatenate([end, *pieces])
    text = ValidationText(tokens, 32, fingerprint="", name="")
    assert text.count_bytes(tokenizer) == sum(len(each.encode()) for each in DOCUMENTS)
    half = text.limited(len(tokens) // 2)
    rows = [half.batch(number, 1)["labels"][0] for number in range(half.num_batches(1))]
    predicted = np.concatenate([row[row != IGNORED_LABEL].numpy() for row in rows])
    lengths = {int(each): tokenizer.count_bytes(np.array([each]), end) for each in np.unique(predicted)}
    assert half.count_bytes(tokenizer) == sum(lengths[each] for each in predicted.tolist())


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_share_divides_the_documents_between_training_and_validation(documents, tmp_path, share):
    chosen = data(documents, tmp_path, validation=ValidationSource(share=share))
    train, held = ([*each.documents()] for each in (open_corpus(chosen), open_validation_corpus(chosen)))
    assert sorted(train + held) == sorted(DOCUMENTS)
    assert not {*train} & {*held}
    assert len(held) == pytest.approx(share * len(DOCUMENTS), abs=4 * math.sqrt(share * len(DOCUMENTS)))
    names = [each.name for each in (open_corpus(chosen), open_validation_corpus(chosen))]
    assert names == [f"{documents} (documents not held out)", f"{documents} (held-out documents)"]


def test_a_document_keeps_its_side_whatever_else_is_there(documents, tmp_path):
    small, large = (
        {*open_validation_corpus(data(documents, tmp_path, validation={"share": share})).documents()}
        for share in (0.1, 0.3)
    )
    assert small < large
    with documents.open("a") as file:
        file.writelines(json.dumps({"text": f"{number} more"}) + "\n" for number in range(100))
    after = {*open_validation_corpus(data(documents, tmp_path, validation={"share": 0.1})).documents()}
    assert small < after
    assert not (after - small) & {*DOCUMENTS}


def test_a_share_changes_the_training_data_and_other_text_does_not(documents, tmp_path):
    held = tmp_path / "held.txt"
    held.write_text("held out " * 30)
    loaders = [
        build_loader(data(documents, tmp_path, **more), micro_batch_size=2, rank=0, world_size=1)
        for more in ({}, {"validation": {"corpus": str(held)}}, {"validation": {"share": 0.2}})
    ]
    plain, other, share = (each.fingerprint for each in loaders)
    assert plain == other != share
    assert [each.validation is not None for each in loaders] == [False, True, True]
    total = loaders[0].dataset.num_tokens
    assert loaders[2].dataset.num_tokens + loaders[2].validation.num_predicted + 1 == total


def test_a_share_of_a_blend_counts_the_bad_records_of_all_sources(documents, tmp_path):
    with documents.open("a") as file:
        file.write('{"text": null}\n')
    other = tmp_path / "other.jsonl"
    other.write_text(documents.read_text())

    def opened(limit):
        sources = {name: {"corpus": str(path)} for name, path in (("a", documents), ("b", other))}
        given = {"sources": {name: {**each, "weight": 1} for name, each in sources.items()}}
        given |= {"cache_dir": tmp_path / "cache", "validation": {"share": 0.2}, "max_bad_records": limit}
        return open_validation_corpus(DataSettings(sequence_length=32, **given))

    corpus = opened(1)
    shares_read = [corpus.share_read for _ in corpus.documents()]
    assert shares_read == sorted(shares_read)
    assert shares_read[0] < corpus.share_read == 1
    assert corpus.bad_records.count == 2
    packing.pack(corpus, BYTES, 32, tmp_path)
    with pytest.raises(UserError, match=r"has 2 bad records, and data\.max_bad_records is 0"):
        packing.pack(opened(0), BYTES, 32, tmp_path)  # from the cache


@pytest.mark.parametrize("is_blend", [False, True])
def test_a_file_for_validation_inside_the_folder_for_training_is_refused(tmp_path, is_blend):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "held.txt"):
        (folder / name).write_text(name * 99)
    corpus = {"sources": {"a": {"corpus": str(folder), "weight": 1}}} if is_blend else {"corpus": str(folder)}
    corpus["cache_dir"] = tmp_path / "cache"
    for held in (folder / "held.txt", folder / "h*.txt"):
        settings = DataSettings(sequence_length=8, validation={"corpus": str(held)}, **corpus)
        with pytest.raises(UserError, match=r"held\.txt is the text for training: name other"):
            build_loader(settings, micro_batch_size=1, rank=0, world_size=1)
    (folder / "held.txt").rename(tmp_path / "held.txt")
    held = {"corpus": str(tmp_path / "held.txt")}
    settings = DataSettings(sequence_length=8, validation=held, **corpus)
    assert build_loader(settings, micro_batch_size=1, rank=0, world_size=1).validation is not None


@pytest.mark.parametrize("is_blend", [False, True])
def test_each_corpus_is_opened_once(tmp_path, monkeypatch, is_blend):
    opened, walk = [], LocalCorpus.__init__
    monkeypatch.setattr(
        LocalCorpus,
        "__init__",
        lambda self, path, **given: opened.append(path.name) or walk(self, path, **given),
    )
    for name in ("a.txt", "b.txt", "held.txt"):
        (tmp_path / name).write_text(f"{name} is a text. " * 99)
    sources = {name: {"corpus": str(tmp_path / f"{name}.txt"), "weight": 1} for name in "ab"}
    corpus = {"sources": sources} if is_blend else {"corpus": str(tmp_path / "a.txt")}
    settings = DataSettings(
        sequence_length=8, tokenizer="bpe", vocab_size=300, cache_dir=tmp_path / "cache",
        validation={"corpus": str(tmp_path / "held.txt")}, **corpus
    )  # fmt: skip
    count_samples(settings)
    assert opened == ["a.txt", *["b.txt"] * is_blend, "held.txt"]


@pytest.mark.parametrize("is_held_out", [False, True])
def test_both_shares_count_all_bad_records_and_know_how_much_is_read(documents, tmp_path, is_held_out):
    with documents.open("a") as file:
        file.write('{"text": null}\n{"text": 3}\n')
    opened = open_validation_corpus if is_held_out else open_corpus
    share = {"validation": {"share": 0.2}}
    corpus = opened(data(documents, tmp_path, max_bad_records=2, **share))
    shares_read = [corpus.share_read for _ in corpus.documents()]
    assert shares_read == sorted(shares_read)
    assert 0 < shares_read[0] < shares_read[-1] <= corpus.share_read == 1
    assert (corpus.bad_records.count, corpus.bad_records.limit) == (2, 2)
    packing.pack(corpus, BYTES, 32, tmp_path)
    fewer = opened(data(documents, tmp_path, max_bad_records=1, **share))
    with pytest.raises(UserError, match=r"has 2 bad records, and data\.max_bad_records is 1"):
        packing.pack(fewer, BYTES, 32, tmp_path)  # from the cache


def test_text_for_validation_is_built_with_the_settings_of_the_data(documents, tmp_path, monkeypatch):
    seen, write_tokens = [], packing.write_tokens

    def write(corpus, *rest, workers):
        seen.append((corpus.name, workers))
        return write_tokens(corpus, *rest, workers=1)

    monkeypatch.setattr(packing, "write_tokens", write)
    count_samples(data(documents, tmp_path, validation={"share": 0.2}, workers=3))
    sides = ("held-out documents", "documents not held out")
    assert seen == [(f"{documents} ({side})", 3) for side in sides]


def token_files(prefix, ids):
    with MegatronWriter(prefix, 256) as writer:
        writer.add_document(ids)
    return str(prefix)


def test_ids_without_a_tokenizer_have_no_bytes():
    assert NoTokenizer(50).count_bytes(np.arange(1, 50), np.arange(49)) == 0


def test_ids_for_validation_are_those_of_the_text(documents, tmp_path):
    """Token ids and the text that they stand for give the same batches and bytes."""
    text = open_validation(data("stdlib", tmp_path, validation={"corpus": str(documents)}), BYTES)
    ids = np.frombuffer(b"".join(each.encode() + b"\0" for each in DOCUMENTS), np.uint8)
    prefix = token_files(tmp_path / "held", ids)
    for tokenizer in (BYTES, NoTokenizer(256)):
        read = open_validation(data("stdlib", tmp_path, validation={"corpus": prefix}), tokenizer)
        assert read.count_bytes(tokenizer) == (text.count_bytes(BYTES) if tokenizer is BYTES else 0)
        assert read.num_batches(4) == text.num_batches(4)
        for number in range(text.num_batches(4)):
            expected = text.batch(number, 4)
            assert all(each.equal(expected[key]) for key, each in read.batch(number, 4).items())


# 32 sequences of 32 tokens; number 11 begins with token 702
@pytest.mark.parametrize(
    ("limit", "place", "is_read"), [(None, 699, True), (1024, 702, True), (1024, 701, False)]
)
def test_every_id_that_is_read_is_checked_before_training(tmp_path, monkeypatch, limit, place, is_read):
    monkeypatch.setattr(megatron, "NUM_BLOCKS", 2)  # only the first and the last ids are checked when opened
    monkeypatch.setattr(megatron, "ID_BLOCK", 10)
    ids = np.ones(2000, np.int64)
    ids[place] = 200
    prefix = token_files(tmp_path / "held", ids)
    tokenizer = NoTokenizer(150)
    text = open_validation(data("stdlib", tmp_path, validation={"corpus": prefix}), tokenizer).limited(limit)
    if is_read:
        message = (
            rf"^data\.validation: corpus .*held: token id 200 at position {place} of document 0 is outside"
        )
        with pytest.raises(UserError, match=message):
            text.count_bytes(tokenizer)
    else:
        text.count_bytes(tokenizer)


def test_opening_reads_no_further_than_to_the_first_label():
    class Recorded:
        def __init__(self, ids):
            self.ids, self.read = ids, 0

        def __len__(self):
            return len(self.ids)

        def __getitem__(self, places):
            self.read += len(self.ids[places])
            return self.ids[places]

    rules = DocumentRules(end=0, masks_first=True)
    tokens = np.zeros(10**6, np.uint16)
    tokens[100_000] = 1
    recorded = Recorded(tokens)
    text = ValidationText(recorded, 32, fingerprint="f", name="ids", rules=rules)
    assert recorded.read < 200_000
    assert text.count_tokens() == 1
    with pytest.raises(UserError, match="all tokens to predict are first tokens of documents"):
        ValidationText(np.zeros(10**6, np.uint16), 32, fingerprint="f", name="ids", rules=rules)


def test_no_share_of_token_ids_is_held_out(tmp_path):
    prefix = token_files(tmp_path / "ids", np.ones(500, np.int64))
    chosen = data(prefix, tmp_path, validation={"share": 0.2})
    for opened in (open_corpus, describe_validation):
        with pytest.raises(UserError, match=r"data\.validation\.share = 0\.2 divides text, and corpus .*ids"):
            opened(chosen)


def test_the_text_for_training_under_another_name_is_refused(documents, tmp_path):
    prefix = token_files(tmp_path / "ids", np.ones(500, np.int64))
    (tmp_path / "copy.jsonl").write_bytes(documents.read_bytes())
    for corpus, other in ((documents, tmp_path / "copy.jsonl"), (prefix, f"{prefix}.bin")):
        with pytest.raises(UserError, match=r"^data\.validation: .* is the text for training"):
            count_samples(data(corpus, tmp_path, validation={"corpus": str(other)}))


@pytest.mark.parametrize("kind", ["copy", "link", "hard link", "within 2 MiB"])
def test_a_copy_of_one_file_for_training_is_refused(tmp_path, kind):
    """Wherever it is; a file of the same size is none."""
    text = b"".join(b"line %d of the text\n" % line for line in range(100_000 if kind[0] == "w" else 200))
    folder, held = tmp_path / "texts", tmp_path / "elsewhere" / "held.txt"
    folder.mkdir(), held.parent.mkdir()
    (folder / "a.txt").write_bytes(text)
    (folder / "z.txt").write_bytes(b"another text " * 50)
    if kind.endswith("link"):
        (held.hardlink_to if kind == "hard link" else held.symlink_to)(folder / "a.txt")
    else:
        held.write_bytes(text)
    chosen = data(folder, tmp_path, validation={"corpus": str(held.parent)})
    with pytest.raises(
        UserError, match=rf"^data\.validation: {held} \(equal to {folder}/a.txt\) is the text"
    ):
        count_samples(chosen)
    held.unlink()
    held.write_bytes(text[::-1])
    assert count_samples(chosen) > 0


@pytest.mark.parametrize("kind", ["copy", "link"])
def test_few_copies_are_a_warning_unless_they_are_the_file_itself(tmp_path, caplog, kind):
    texts, held = tmp_path / "texts", tmp_path / "held"
    for number, folder in enumerate((texts, held)):
        folder.mkdir()
        (folder / "a.txt").write_text(f"{number} own text. " * 100)
    (texts / "LICENSE.txt").write_text("N/A")
    (texts / "more.txt").write_text("N/A")  # a copy does not hide the file itself
    chosen = data(texts, tmp_path, validation={"corpus": str(held)})
    if kind == "link":
        (held / "LICENSE.txt").symlink_to(texts / "LICENSE.txt")
        with pytest.raises(
            UserError, match=r"held/LICENSE\.txt \(equal to .*texts/LICENSE\.txt\) is the text"
        ):
            count_samples(chosen)
        return
    (held / "LICENSE.txt").write_text("N/A")
    assert count_samples(chosen) > 0
    assert "files equal to files for training: 1 of 2, 0.25 % of the bytes, such as" in caplog.text
    (held / "a.txt").write_text("x" * 290)  # 3 of 293 bytes
    with pytest.raises(UserError, match=r"held/LICENSE\.txt \(equal to .*\) is the text for training"):
        count_samples(chosen)


def test_another_field_of_a_file_for_training_is_refused(documents, tmp_path):
    held = tmp_path / "link.jsonl"
    held.symlink_to(documents)
    with pytest.raises(UserError, match="is the text for training"):
        count_samples(data(documents, tmp_path, validation={"corpus": str(held), "text_field": "other"}))


def test_files_are_compared_with_those_for_training_once(tmp_path, monkeypatch):
    read, original = [], digests.content_digest
    monkeypatch.setattr(digests, "NS_UNTIL_SETTLED", 0)
    monkeypatch.setattr(digests, "content_digest", lambda *each: read.append(each[0]) or original(*each))
    sources = {}
    for name in ("a", "b", "held"):  # of equal sizes
        (tmp_path / f"{name}.txt").write_text(f"{name[0]} some text " * 99)
        sources[name] = {"corpus": str(tmp_path / f"{name}.txt"), "weight": 1}
    held = {"corpus": sources.pop("held")["corpus"]}
    chosen = DataSettings(sources=sources, sequence_length=8, cache_dir=tmp_path / "c", validation=held)
    count_samples(chosen)
    assert read
    read.clear()
    count_samples(chosen)
    assert not [file for file in read if file.suffix == ".txt"]


@pytest.mark.parametrize("is_blend", [False, True])
def test_token_ids_for_training_with_another_index_are_refused(tmp_path, is_blend):
    ids = np.random.default_rng(0).integers(1, 255, 500)
    trained = token_files(tmp_path / "one", ids)
    with MegatronWriter(tmp_path / "two", 256) as writer:  # the same ids, in more documents
        for part in np.split(ids, 10):
            writer.add_document(part)
    other = str(tmp_path / "two")
    more = {"sequence_length": 8, "cache_dir": tmp_path / "cache"}
    if is_blend:
        sources = {name: {"corpus": each, "weight": 1} for name, each in (("a", trained), ("b", other))}
        with pytest.raises(UserError, match=r"data\.sources\.a and data\.sources\.b are the same text"):
            count_samples(DataSettings(sources=sources, **more))
        return
    with pytest.raises(UserError, match=r"^data\.validation: .*two\.bin .* is the text for training"):
        count_samples(DataSettings(corpus=trained, validation={"corpus": other}, **more))


def test_what_is_trained_on_is_refused_before_it_is_tokenised(documents, tmp_path, monkeypatch):
    (tmp_path / "copy.jsonl").write_bytes(documents.read_bytes())
    monkeypatch.setattr(packing, "write_tokens", lambda *_args, **_more: pytest.fail("tokenised"))
    with pytest.raises(UserError, match="is the text for training"):
        count_samples(data(documents, tmp_path, validation={"corpus": str(tmp_path / "copy.jsonl")}))


@pytest.mark.parametrize(("text_field", "expected"), [("content", DOCUMENTS[:50]), (None, DOCUMENTS[50:100])])
def test_the_text_may_be_in_another_field_than_that_for_training(documents, tmp_path, text_field, expected):
    held = tmp_path / "held.jsonl"
    pairs = zip(DOCUMENTS[:50], DOCUMENTS[50:100], strict=True)
    held.write_text("".join(json.dumps({"content": own, "text": other}) + "\n" for own, other in pairs))
    chosen = data(documents, tmp_path, validation={"corpus": str(held), "text_field": text_field})
    assert list(open_validation_corpus(chosen).documents()) == expected
    assert list(open_corpus(chosen).documents()) == DOCUMENTS


def test_a_field_of_a_share_is_refused():
    with pytest.raises(ValueError, match=r"text_field has no effect here: set data\.text_field"):
        ValidationSource(share=0.1, text_field="content")


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_a_share_of_nothing_or_all_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        ValidationSource(share=share)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"corpus": "{folder}/none.txt"}, "^data.validation: corpus .*none.txt' does not exist"),
        (
            {"corpus": "{folder}/short.txt"},
            "^data.validation: corpus .*short.txt has 6 tokens, fewer than one",
        ),
        ({"corpus": "{folder}/documents.jsonl"}, "is the text for training: name other text, or set share"),
        (
            {"split": "validation"},
            "split = 'validation' needs a Hugging Face data set, and corpus .* is not one: name the files of "
            "that split in data.validation.corpus, or",
        ),
        ({"share": 1e-9}, "^data.validation.share = 1e-09 holds out none of the 200 documents .*: raise it"),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_one_line(documents, tmp_path, named, message):
    (tmp_path / "short.txt").write_text("short")
    named = {
        key: str(value).format(folder=tmp_path) if key != "share" else value for key, value in named.items()
    }
    with pytest.raises(UserError, match=message) as refused:
        open_validation(data(documents, tmp_path, validation=named), BYTES)
    assert "\n" not in str(refused.value)
    assert str(refused.value).count("data.validation: ") == ("share" not in named)


def test_a_bad_record_of_a_held_out_share_is_one_of_the_corpus(tmp_path):
    corpus = tmp_path / "texts"
    corpus.mkdir()
    (corpus / "a.txt").write_bytes(b"bad \xff byte")
    line = (
        f"corpus file {corpus / 'a.txt'}, line 1: byte 0xff is not UTF-8: convert the file, or leave such "
        "records out with data.max_bad_records"
    )
    for validation, prefix in (({"share": 0.5}, ""), ({"corpus": str(corpus)}, "data.validation: ")):
        trained = corpus if not prefix else tmp_path / "none.txt"
        with pytest.raises(UserError) as refused:
            open_validation(data(trained, tmp_path, validation=validation), BYTES)
        assert str(refused.value) == prefix + line


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-12])
def test_a_share_of_one_text_file_is_refused_with_a_remedy_that_helps(tmp_path, share):
    corpus = tmp_path / "book.txt"
    corpus.write_text("all of it is one document. " * 10)
    given = data(corpus, tmp_path, validation={"share": share})
    with pytest.raises(
        UserError, match=r"which no share can divide: name other text in data\.valid"
    ) as found:
        open_validation(given, BYTES) if share < 0.5 else count_samples(given)
    assert "raise it" not in str(found.value)
    assert "\n" not in str(found.value)


def test_text_is_described_without_reading_it(documents, tmp_path):
    held = tmp_path / "held.txt"
    held.write_text("short")
    names = [
        describe_validation(data(corpus, tmp_path, validation=named))
        for corpus, named in (
            (documents, None),
            (documents, {"corpus": str(held)}),
            (documents, {"share": 1e-9}),
            ("wikitext", {"split": "validation"}),
        )
    ]
    shown = "data set wikitext, validation (not downloaded)"
    assert names == [None, str(held), f"{documents} (held-out documents)", shown]
    with pytest.raises(UserError, match=r"^data.validation: corpus 'none.txt' does not exist"):
        describe_validation(data(documents, tmp_path, validation={"corpus": "none.txt"}))


def test_a_share_that_leaves_nothing_to_train_on_is_refused(documents, tmp_path):
    with pytest.raises(UserError, match=r"holds out all of the 200 documents .*: lower it"):
        count_samples(data(documents, tmp_path, validation={"share": 1 - 1e-12}))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "names no text: set corpus"),
        ({"share": 0.1, "split": "test"}, "share is set, and also corpus or split"),
        ({"share": 0.1, "corpus": "x.txt"}, "share is set, and also corpus or split"),
        ({"split": "test", "corpus_config": "x"}, "corpus_config = 'x' needs corpus"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(named, message):
    with pytest.raises(ValueError, match=message):
        ValidationSource(**named)
