import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.data.corpus import Corpus
from megalowbit.data.loader import ShardedLoader
from megalowbit.data.order.best_fit import BestFitPlan, best_fit_plan
from megalowbit.data.packing import BestFitDataset, DocumentRules, PackedDataset, best_fit, pack
from megalowbit.data.token_files import build
from megalowbit.data.token_files.megatron import MegatronCorpus, MegatronWriter
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError
from megalowbit.labels import IGNORED_LABEL


class Documents(Corpus):
    name = "documents"
    fingerprint = ""

    def __init__(self, *texts, fingerprint="f"):
        self.texts = texts
        self.fingerprint = fingerprint
        self.reads = 0

    def documents(self):
        self.reads += 1
        yield from self.texts


class WideTokenizer(ByteTokenizer):
    """Ids beyond 16 bits."""

    vocab_size = 70_256
    eos_token_id = 70_000
    fingerprint = "wide"


def token_file(folder):
    (path,) = (folder / "tokens").glob("*.npy")
    return path


def test_samples_are_concatenated_documents_with_end_tokens(tmp_path):
    dataset = pack(Documents("abc", "de", "fghij"), ByteTokenizer(), 4, tmp_path)
    expected = np.frombuffer(b"abc\0de\0fghij", np.uint8).astype(np.int64).reshape(3, 4)
    assert len(dataset) == dataset.num_samples == 3
    assert dataset.num_tokens == 13
    for index in range(3):
        assert dataset[index].dtype == torch.int64
        assert dataset[index].tolist() == expected[index].tolist()
    assert dataset.batch(np.array([2, 0])).tolist() == expected[[2, 0]].tolist()


def test_batches_of_documents_do_not_change_the_result(tmp_path, monkeypatch):
    texts = [f"document {number} " * (number % 7 + 1) for number in range(200)]
    tokens = np.frombuffer("".join(f"{text}\0" for text in texts).encode(), np.uint8)
    for number, (documents, characters) in enumerate([(512, 2**20), (1, 2**20), (7, 50)]):
        monkeypatch.setattr(build, "BATCH_DOCUMENTS", documents)
        monkeypatch.setattr(build, "BATCH_CHARACTERS", characters)
        pack(Documents(*texts), ByteTokenizer(), 8, tmp_path / str(number))
        assert np.array_equal(np.load(token_file(tmp_path / str(number))), tokens)


def test_tokens_take_two_bytes_if_the_vocabulary_allows_it_else_four(tmp_path):
    pack(Documents("abcdef"), ByteTokenizer(), 2, tmp_path / "narrow")
    wide = pack(Documents("abcdef"), WideTokenizer(), 7, tmp_path / "wide")
    assert np.load(token_file(tmp_path / "narrow")).dtype == np.uint16
    assert np.load(token_file(tmp_path / "wide")).dtype == np.uint32
    assert wide[0].tolist() == [*b"abcdef", 70_000]


def test_a_corpus_is_tokenised_once_for_all_lengths(tmp_path):
    corpus = Documents("abcdefgh")
    first = pack(corpus, ByteTokenizer(), 2, tmp_path)
    again = pack(corpus, ByteTokenizer(), 2, tmp_path)
    other = pack(corpus, ByteTokenizer(), 4, tmp_path)
    assert corpus.reads == 1
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (
        pack(Documents("x" * 9, fingerprint="g"), ByteTokenizer(), 2, tmp_path).fingerprint
        != first.fingerprint
    )
    assert pack(corpus, WideTokenizer(), 2, tmp_path).fingerprint != first.fingerprint


def test_a_damaged_token_file_is_made_again(tmp_path, caplog):
    corpus = Documents("abcdefgh")
    pack(corpus, ByteTokenizer(), 4, tmp_path)
    path = token_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with caplog.at_level(logging.WARNING):
        assert pack(corpus, ByteTokenizer(), 4, tmp_path)[1].tolist() == [*b"efgh"]
    assert "is damaged" in caplog.text
    assert corpus.reads == 2


def test_a_corpus_shorter_than_one_sequence_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(UserError, match="documents has 4 tokens, fewer than one sequence of 5"):
        pack(Documents("abc"), ByteTokenizer(), 5, tmp_path)
    assert len(pack(Documents("abc"), ByteTokenizer(), 4, tmp_path)) == 1


def test_a_corpus_without_documents_is_refused_and_nothing_is_cached(tmp_path):
    with pytest.raises(UserError, match="documents contains no text"):
        pack(Documents(), ByteTokenizer(), 4, tmp_path)
    assert not list((tmp_path / "tokens").iterdir())


def test_a_sample_beyond_the_end_is_an_error():
    dataset = PackedDataset(np.arange(10, dtype=np.uint16), 4, fingerprint="f")
    with pytest.raises(IndexError):
        dataset[2]


def test_the_header_has_one_length_for_every_number_of_tokens():
    lengths = {len(build._header(np.dtype(np.uint16), 10**digits)) for digits in range(16)}
    assert lengths == {build.HEADER_BYTES}


def separate(row, end):
    """Positions of a row, counted token by token."""
    positions, position = [], 0
    for token in row:
        positions.append(position)
        position = 0 if token == end else position + 1
    return positions


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4), st.booleans())
def test_positions_restart_and_first_tokens_may_be_no_labels(rows, masks_first):
    ids = torch.tensor(rows)
    batch = DocumentRules(end=2, are_separate=True, masks_first=masks_first).batch(ids)
    assert batch["input_ids"].equal(ids)
    assert batch["position_ids"].tolist() == [separate(row, 2) for row in rows]
    for row, labels in zip(rows, batch["labels"].tolist(), strict=True):
        for place, token in enumerate(row):
            is_first = masks_first and place > 0 and row[place - 1] == 2
            assert labels[place] == (-100 if is_first else token)


def test_documents_that_nothing_ends_cannot_be_kept_apart(tmp_path):
    with MegatronWriter(tmp_path / "ids", 256) as writer:
        writer.add_document(np.arange(1, 40, dtype=np.uint8))
    corpus = MegatronCorpus(tmp_path / "ids")
    pack(corpus, ByteTokenizer(), 4, tmp_path)  # warns
    with pytest.raises(UserError, match=r"document 0 does not end with .*: make the files with --append-eod"):
        pack(corpus, ByteTokenizer(), 4, tmp_path, needs_ends=True)


def test_one_document_with_an_end_does_not_separate_the_others(tmp_path, caplog):
    end = ByteTokenizer().eos_token_id
    with MegatronWriter(tmp_path / "ids", 257) as writer:
        for last in (end, 5, end):
            writer.add_document(np.array([1, 2, last], dtype=np.uint16))
            writer.add_document(np.array([], dtype=np.uint16))
    corpus = MegatronCorpus(tmp_path / "ids")
    pack(corpus, ByteTokenizer(), 4, tmp_path)
    assert not caplog.records  # some documents are separate
    with pytest.raises(UserError, match="document 2 does not end with"):
        pack(corpus, ByteTokenizer(), 4, tmp_path, needs_ends=True)


def test_best_fit_samples_hold_whole_documents_and_padding(tmp_path):
    texts = ["abcdefghij", "klmno", "p", "qr", "stuvw", "xyz"]
    packed = pack(Documents(*texts), ByteTokenizer(), 8, tmp_path)
    dataset = best_fit(packed, ByteTokenizer(), tmp_path)
    rows = dataset.batch(np.arange(len(dataset))).tolist()
    found = [bytes(row).decode().rstrip("\0") for row in rows]
    assert sorted(found) == sorted(["abcdefgh", "klmno\0p", "stuvw", "xyz\0ij", "qr"])
    assert dataset[0].tolist() == rows[0]
    assert dataset.padding_share == pytest.approx(1 - packed.num_tokens / 40)
    assert (
        dataset.tokens_fingerprint == packed.tokens_fingerprint == packed.fingerprint != dataset.fingerprint
    )
    again = best_fit(packed, ByteTokenizer(), tmp_path)  # from the cache
    assert again.batch(np.array([3, 1])).tolist() == [rows[3], rows[1]]


def test_the_padding_of_best_fit_is_the_end_of_the_corpus():
    tokens = np.array([5, 6, 7, 2, 8, 2, 9, 0, 2, 7, 7], np.uint16)  # 0 is a token as any other
    packed = PackedDataset(tokens, 5, fingerprint="f")
    dataset = BestFitDataset(packed, best_fit_plan(tokens, 2, 5), 2)
    everything = np.arange(len(dataset))
    rows = dataset.batch(everything).tolist()
    unpadded = [row[:count] for row, count in zip(rows, dataset.num_unpadded(everything), strict=True)]
    assert sorted(rows) == [[5, 6, 7, 2, 2], [9, 0, 2, 8, 2]]
    assert sorted(unpadded) == [[5, 6, 7, 2], [9, 0, 2, 8, 2]]
    assert dataset.padding_share == pytest.approx(1 / 10)  # the end of the corpus has no end-of-document id


def test_best_fit_checks_the_ids_of_a_sample_and_names_their_place(tmp_path):
    with MegatronWriter(tmp_path / "ids", 300) as writer:
        for ids in ([5, 6, 7, 2], [8, 2], [9, 290, 2]):
            writer.add_document(np.array(ids, np.uint16))
    corpus = MegatronCorpus(tmp_path / "ids")
    packed = PackedDataset(
        corpus.tokens, 5, fingerprint="f", check=lambda ids, start: corpus.refuse_outside(ids, start, 257)
    )
    dataset = BestFitDataset(packed, best_fit_plan(corpus.tokens, 2, 5), 2)
    damaged = next(index for index in range(len(dataset)) if len(dataset.pieces(index)) == 2)
    assert dataset[1 - damaged].tolist() == [5, 6, 7, 2, 2]
    with pytest.raises(UserError, match=r"token id 290 at position 1 of document 2 is outside .* 257 tokens"):
        dataset.batch(np.array([1 - damaged, damaged]))


def test_padding_is_no_label_and_sees_itself_only():
    ids = torch.tensor([[5, 6, 2, 7, 2, 2, 2], [5, 2, 2, 2, 2, 2, 2], [2, 2, 2, 8, 2, 2, 9]])
    num_unpadded = torch.tensor([5, 3, 7])  # the second row has an empty document, the third three
    for masks_first in (False, True):
        rules = DocumentRules(end=2, are_separate=True, masks_first=masks_first)
        batch = rules.batch(ids, num_unpadded)
        expected = [[5, 6, 2, 7, 2, -100, -100], [5, 2, 2, *[-100] * 4], [2, 2, 2, 8, 2, 2, 9]]
        if masks_first:
            expected = [[5, 6, 2, -100, 2, -100, -100], [5, 2, *[-100] * 5], [2, *[-100] * 3, 2, -100, -100]]
        assert batch["labels"].tolist() == expected
        assert batch["position_ids"].tolist() == [separate(row, 2) for row in ids.tolist()]
        assert batch["input_ids"].equal(ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("ab", max_size=9), min_size=8, max_size=30))
def test_each_token_of_best_fit_is_a_label_once_also_in_empty_documents(texts):
    tokens = np.frombuffer("".join(f"{text}\0" for text in texts).encode(), np.uint8)
    packed = PackedDataset(tokens, 5, fingerprint="f")
    dataset = BestFitDataset(packed, best_fit_plan(tokens, 0, 5), 0)
    loader = ShardedLoader(
        dataset, micro_batch_size=1, rank=0, world_size=1, seed=0, tokenizer=ByteTokenizer(),
        rules=DocumentRules(end=0, are_separate=True),
    )  # fmt: skip
    batches = [next(loader) for _ in range(len(dataset))]  # an epoch
    labels = torch.cat([batch["labels"] for batch in batches])
    ids = torch.cat([batch["input_ids"] for batch in batches])
    is_label = labels != IGNORED_LABEL
    assert labels[is_label].equal(ids[is_label])
    assert sorted(labels[is_label].tolist()) == sorted(tokens.tolist())
    assert (ids[~is_label] == 0).all()
    assert (is_label.int().diff(dim=1) <= 0).all()  # padding is last


def test_best_fit_knows_its_padding_without_reading_the_plan(tmp_path):
    count = 3_000_000  # documents of two tokens; two in a sample of five
    tokens = np.tile(np.array([1, 0], np.uint16), count)
    starts = np.arange(0, 2 * count, 2)
    plan = BestFitPlan(np.arange(0, count + 1, 2), starts, np.full(count, 2))
    plan.save(tmp_path / "plan.npy")
    packed = PackedDataset(np.append(tokens, [7] * 9), 5, fingerprint="f")

    def memory_of_files():
        return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) * 1024

    before = memory_of_files()
    samples = BestFitDataset(packed, BestFitPlan.load(tmp_path / "plan.npy"), 0)
    assert memory_of_files() - before < 2**20  # lengths alone have 24 MB
    assert samples.padding_share == pytest.approx(1 / 5)


@pytest.mark.parametrize("place", [0, 1, 2**16 - 1, 2**16, 2**17 + 3, 2**17 + 9])
def test_the_last_end_of_a_document_is_found_anywhere(place):
    tokens = np.ones(2**17 + 10, np.uint16)
    tokens[place] = 0
    samples = BestFitDataset(
        packed := PackedDataset(tokens, 5, fingerprint="f"), plan := best_fit_plan(packed.tokens, 0, 5), 0
    )
    assert samples.padding_share == 1 - plan.lengths.sum() / (len(samples) * 5)
